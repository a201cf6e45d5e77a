"""Child processes as the kernel sees them: who ends with whom, who is taken first when memory runs out, how one ended.

    trainer <-- pidfd -- helper <-- parent-death signal -- worker        (fork)
    trainer <-- pidfd, a thread in the worker                            (spawn, forkserver)

Nobody relies on the end of a pipe: younger siblings inherit its other end and keep it open.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
#: A stack comes line by line, without an end mark; after such a pause it is taken to be whole.
_STACK_PAUSE_MS = 30
#: A worker writes its Python stack to the descriptor that it was given when it gets this signal, even stuck in C code.
STACK_SIGNAL = signal.SIGRTMIN + 13
#: Added to a worker's oom_score_adj (-1000..1000; each point is a thousandth of the machine's memory).
OOM_SCORE_STEP = 300


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill the calling process when ``parent_pid``, its parent, ends.

    Call it in a child of a process that never forks from a thread: the signal comes when the forking *thread* ends.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the line above
        os._exit(1)


def watch_from_thread(pidfd: int) -> None:
    """End the calling process as soon as the process behind ``pidfd`` is gone. A daemon thread waits for that."""

    def wait() -> NoReturn:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, name="headrace-watchdog", daemon=True).start()


def prefer_for_oom_killer() -> None:
    """Let the kernel take this process before the trainer when memory runs out. Does nothing where it may not."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            adjusted = min(int(file.read()) + OOM_SCORE_STEP, 1000)
            file.seek(0)
            file.write(str(adjusted))
    except (OSError, ValueError):  # no /proc, or a sandbox that forbids it: the kernel's own order holds
        pass


def ignore_interrupts() -> None:
    """Ctrl-C reaches the whole group: only the trainer answers it. SIGTERM ends a child at once, without handlers."""
    signal.set_wakeup_fd(-1)  # inherited from an event loop, it would write into the parent's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as a trainer may have it, it would let no child be reaped


def ignore_handled_signals() -> dict[int, Any]:
    """In a child that is not to run the parent's handlers: ignore what they handle.

    Returns:
        The handlers, by signal; ``ignore_interrupts`` has dealt with its signals before.
    """
    handlers = {
        int(number): handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))
    }
    for number in handlers:
        signal.signal(number, signal.SIG_IGN)
    return handlers


def dump_stack_on_signal(fd: int) -> None:
    """Let the calling process answer ``STACK_SIGNAL``; needs no GIL, so that nothing the process does prevents it."""
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)


def ask_for_stack(pid: int, fd: int, limit_ms: int) -> str:
    """The Python stack of a process that has called ``dump_stack_on_signal``.

    Args:
        pid: The process.
        fd: The other end of the pipe to which it writes; does not block.
        limit_ms: How long to wait for the first line.

    Returns:
        Lines, the innermost frame first; empty when nothing came (it is stopped, or in the kernel).
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while poller.poll(0):  # what an earlier question has left
        os.read(fd, 65536)
    kill(pid, STACK_SIGNAL)
    text, wait_ms = b"", limit_ms
    while poller.poll(wait_ms):
        text += os.read(fd, 65536)
        wait_ms = _STACK_PAUSE_MS
    return text.decode(errors="replace").strip()


def kill(pid: int, number: int) -> None:
    """Send a signal to a child that may be gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def wait_gone(pidfd: int, limit_ms: int | None) -> bool:
    """Whether the process behind ``pidfd`` has ended; blocks for ``limit_ms`` at most (None: without limit)."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(limit_ms))


def exit_code(status: int) -> int:
    """A wait status as ``subprocess`` and ``multiprocessing`` give it: the exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(status)


def describe_exit(code: int) -> str:
    """How a process ended, in DataLoader's words and with the signal's name.

    Args:
        code: The exit status, or minus the number of the signal.
    """
    if code >= 0:
        return f"exited unexpectedly with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"is killed by signal: {signal.strsignal(-code) or name} ({name}, signal {-code})"


def likely_cause(code: int) -> str:
    """What usually ends a process this way; one clause for an error message."""
    causes = {
        -signal.SIGKILL: "often the kernel's out-of-memory killer: look at the memory of workers and container",
        -signal.SIGSEGV: "a fault in native code that the dataset calls",
        -signal.SIGBUS: "a file that shrank while it was mapped, or shared memory that ran out",
        -signal.SIGABRT: "native code gave up, often because an allocation failed",
        -signal.SIGTERM: "somebody ended it, for example a scheduler",
    }
    return causes.get(code, "code that the dataset calls ended the process" if code >= 0 else "see the signal")


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that this process owns."""
    for fd in fds:
        os.close(fd)
