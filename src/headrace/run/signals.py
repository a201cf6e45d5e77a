"""Signals of a launcher that wants to go unnoticed, and the wait for its child.

Who gets which signal while the program runs:

    terminal: Ctrl-C             the kernel sends SIGINT, SIGQUIT (Ctrl-backslash) to the whole process group: the
                                 program has its own, headrace drops its copy
    terminal: Ctrl-Z, fg         SIGTSTP and SIGCONT reach both the same way: both stop, both go on
    kill, scheduler: SIGTERM,    sent to headrace alone: passed on. Sent to the whole group, the program gets it twice
      SIGHUP, SIGUSR1, SIGUSR2   (the kernel does not tell a receiver which it was)
    SIGKILL, SIGSTOP             cannot be seen; the program goes on

The signals are blocked, not handled: the wait takes them one by one (``sigwaitinfo``), nothing can slip in between
looking and waiting, and the child starts with the mask and dispositions that headrace was started with, so that
what was ignored (nohup) stays ignored.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LEFT_TO_THE_PROGRAM = (signal.SIGINT, signal.SIGQUIT)
_WAITED_FOR = frozenset({signal.SIGCHLD, *FORWARDED, *LEFT_TO_THE_PROGRAM})
#: Python ignores these at its own start, so what they were before is not known; default is what they nearly always are.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
#: linux/asm-generic/siginfo.h: sent by the kernel, not by a process.
_SI_KERNEL = 0x80


@dataclass(frozen=True, kw_only=True)
class End:
    """How the program ended: ``exit_code`` or ``signal``, the other is None."""

    exit_code: int | None = None
    signal: int | None = None
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """What headrace was started with and the program is to get: the signal mask, and whether SIGCHLD is ignored."""

    mask: frozenset[int]
    children_ignored: bool


@contextmanager
def held() -> Iterator[Inherited]:
    """Blocks the signals that ``wait_for_end`` takes; yields what was there before. Main thread."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    children_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if children_ignored:  # as some daemons start their jobs; the kernel would throw the exit status away
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield Inherited(mask=frozenset(int(number) for number in mask), children_ignored=children_ignored)
    finally:
        # What came until now was meant for the program; what comes from now on is meant for us.
        while signal.sigtimedwait(_WAITED_FOR, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def restore(before: Inherited) -> None:
    """In the forked child, before exec: signals as headrace found them. What is ignored stays ignored (nohup)."""
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler, which could still run before exec
    if before.children_ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)


def wait_for_end(pid: int) -> End:
    """Blocks until the child ``pid`` has ended, and passes signals on to it. To be called inside ``held``."""
    while (end := _reap(pid)) is None:
        _pass_on(pid, signal.sigwaitinfo(_WAITED_FOR))
    return end


def wait_for_end_until(pid: int, deadline_s: float) -> End | None:
    """The same up to a moment of ``time.monotonic()``; None when the child has not ended by then."""
    while (end := _reap(pid)) is None:
        info = signal.sigtimedwait(_WAITED_FOR, max(0.0, deadline_s - time.monotonic()))
        if info is None:
            return None
        _pass_on(pid, info)
    return end


def die_like(end: End) -> NoReturn:
    """Ends this process as the program ended: same exit code, or by the same signal.

    As process 1 of a container a process cannot die by its own signal; 128 + signal is what shells say then.
    """
    if end.signal is None:
        os._exit(end.exit_code or 0)
    if os.getpid() != 1:
        _kill_self(end.signal)
    os._exit(128 + end.signal)


def _pass_on(pid: int, info: signal.struct_siginfo) -> None:
    if info.si_signo in FORWARDED and not _comes_from_the_terminal(info):
        os.kill(pid, info.si_signo)  # not reaped yet, so the pid is still the child's


def _reap(pid: int) -> End | None:
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    if result is None:
        _reap_orphans(pid)
        return None
    now_ns = time.monotonic_ns()
    if result.si_code == os.CLD_EXITED:
        return End(exit_code=result.si_status, mono_ns=now_ns)
    return End(signal=result.si_status, mono_ns=now_ns)


def _reap_orphans(pid: int) -> None:
    """Process 1 inherits the children of the dead; left alone they would stay as zombies."""
    if os.getpid() != 1:
        return
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None and ended.si_pid != pid:
        os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)


def _comes_from_the_terminal(info: signal.struct_siginfo) -> bool:
    """A hang-up that the kernel sent to the whole group. A session's leader gets one of its own, which is passed on."""
    return info.si_signo == signal.SIGHUP and info.si_code == _SI_KERNEL and os.getsid(0) != os.getpid()


def _kill_self(number: int) -> None:
    _forbid_core_dump()
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def _forbid_core_dump() -> None:
    # 1, not 0: core(5) and fs/coredump.c of Linux: a core_pattern that is a pipe ignores 0 and is stopped by 1 alone.
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    soft = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
