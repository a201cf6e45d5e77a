"""The worker processes as the trainer sees them: starting them, learning how they ended, ending them.

Two crews with one face (``Crew``): under fork the workers are children of a helper, which replaces the dead by itself;
under spawn and forkserver each is a ``Process`` of the trainer, which replaces them when it next waits for a batch.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any, Protocol

from headrace.errors import LoaderError
from headrace.host import children
from headrace.loader.channel import Channel
from headrace.loader.helper import GRACE_MS, HelperJob, fork_helper
from headrace.loader.messages import Died, Leave, Quit, Start, Started, Vouch

#: How long a helper that does not react is waited for.
_HELPER_LIMIT_MS = 10_000
#: How long a fork server may take to say how a process has ended.
_EXIT_CODE_LIMIT_S = 0.2
#: What multiprocessing says of a process whose end nobody knows.
_UNKNOWN_EXIT = 255


@dataclass(frozen=True, slots=True)
class DeadWorker:
    """A worker has ended.

    Attributes:
        number: Its number.
        pid: Its process.
        code: How it ended; None where that cannot be known.
        replacement: Socket and process of the worker in its place; None: it has not been replaced.
    """

    number: int
    pid: int
    code: int | None
    replacement: tuple[Channel, Any] | None

    def describe(self) -> str:
        """One sentence, in DataLoader's words."""
        if self.code is None:
            return (
                "The helper process of the DataLoader workers ended, and the workers with it. Look for what killed it: "
                "often the kernel's out-of-memory killer."
            )
        end, cause = children.describe_exit(self.code), children.likely_cause(self.code)
        return f"DataLoader worker (pid {self.pid}) {end}: {cause}."


class Crew(Protocol):
    """The workers of one pool. The pool's lock is held by whoever calls, except for what handles do."""

    def start(self, number: int) -> tuple[Channel, Any]:
        """Start a worker; the trainer's end of its socket, and its process. Does not wait until it runs."""

    def fds(self) -> list[int]:
        """Descriptors that become readable when something happened to a worker."""

    def dead(self) -> list[DeadWorker]:
        """Workers that have ended since the last call. Does not block."""

    def vouch(self, handle: Any) -> None:
        """This worker has got ready."""

    def leave(self, handle: Any) -> None:
        """This worker was told to stop."""

    def close(self) -> None:
        """End what is left: wait for the grace, then SIGTERM, then SIGKILL. Blocks for twice the grace at most."""

    def close_in_child(self) -> None:
        """In a forked child: close the descriptors, and touch no process."""


class WorkerHandle:
    """A worker that is the helper's child, with the face of a ``multiprocessing.Process``."""

    daemon = True

    def __init__(self, crew: ForkCrew, number: int, pid: int | None) -> None:
        self._crew, self._pid = crew, pid
        self.number, self.name = number, f"headrace-worker-{number}"
        self._exit_code: int | None = None

    @property
    def pid(self) -> int | None:
        """Its process; waits until the helper has forked it. None where the helper has ended, or is stopped."""
        if self._pid is None:
            self._crew.wait_for(lambda: self._pid is not None, _HELPER_LIMIT_MS / 1000)
        return self._pid

    ident = pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs; the exit status, or minus the signal that ended it."""
        self._crew.pump()
        return self._exit_code

    def is_alive(self) -> bool:
        """Whether it has not been reaped."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Block until it has ended, for ``timeout`` seconds at most."""
        self._crew.wait_for(lambda: self._exit_code is not None, timeout)

    def terminate(self) -> None:
        """Send SIGTERM; it is not replaced."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL; it is not replaced."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """As ``Process`` has it; there is nothing to close."""

    def _signal(self, number: int) -> None:
        if self.is_alive() and self.pid is not None:
            self._crew.leave(self)
            children.kill(self.pid, number)

    def __repr__(self) -> str:
        state = "started" if self._exit_code is None else f"stopped exitcode={self._exit_code}"
        return f"<{type(self).__name__} name={self.name!r} pid={self._pid} {state}>"


class ForkCrew:
    """Workers under a helper."""

    def __init__(self, job: HelperJob) -> None:
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()
        self._unstarted: dict[int, deque[WorkerHandle]] = {}
        self._running: dict[int, WorkerHandle] = {}
        self._dead: deque[DeadWorker] = deque()
        # Readable while deaths wait to be taken: a handle's join() may have read the helper's message before the pool.
        self._news_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._helper_pid, self._pidfd, self._channel = fork_helper(job)
        self._is_closed = False
        #: Whether the helper has closed its end: it says nothing more, and its descriptors are readable for ever.
        self._is_lost = False

    def start(self, number: int) -> tuple[Channel, WorkerHandle]:
        trainers, workers = Channel.pair()
        with self._lock, workers:
            handle = WorkerHandle(self, number, None)
            self._unstarted.setdefault(number, deque()).append(handle)
            while not self._tell(Start(number), [workers.fileno()]):
                self._wait_for_room()
        return Channel(trainers, is_blocking=False), handle

    def _tell(self, message: Any, fds: Sequence[int] = ()) -> bool:
        """Send the helper a message; one that has ended needs none, and ``pump`` will find out. False: no room."""
        try:
            return self._channel.send(message, fds=fds)
        except ConnectionError:
            return True

    def _wait_for_room(self) -> None:
        """The helper has many messages to read; it may have to be read itself before it goes on."""
        self.pump()
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN | select.POLLOUT)
        if not poller.poll(_HELPER_LIMIT_MS):
            raise LoaderError("the helper process of the workers does not read its messages: it seems to be stopped")

    def fds(self) -> list[int]:
        return [self._news_fd] if self._is_lost else [*self._helper_fds(), self._news_fd]

    def _helper_fds(self) -> list[int]:
        return [self._channel.fileno(), self._pidfd]

    def dead(self) -> list[DeadWorker]:
        self.pump()
        with self._lock:
            found = list(self._dead)
            self._dead.clear()
            if found:
                os.eventfd_read(self._news_fd)
        return found

    def _add_dead(self, dead: DeadWorker) -> None:
        self._dead.append(dead)
        os.eventfd_write(self._news_fd, 1)

    def pump(self) -> None:
        """Read what the helper has said. Any thread; does not block."""
        with self._lock:
            try:
                while not (self._is_closed or self._is_lost) and (received := self._channel.receive()) is not None:
                    self._note(received[0], received[2])
            except (EOFError, ConnectionError):
                self._lose_helper()

    def _note(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, Started):
            handle = self._unstarted[message.worker].popleft()
            handle._pid = message.pid
            self._running[message.pid] = handle
            return
        assert isinstance(message, Died)
        self._running.pop(message.pid)._exit_code = message.code
        replacement = None
        if fds:
            new = self._running[message.new_pid] = WorkerHandle(self, message.worker, message.new_pid)
            replacement = Channel(socket.socket(fileno=fds[0]), is_blocking=False), new
        self._add_dead(DeadWorker(message.worker, message.pid, message.code, replacement))

    def _lose_helper(self) -> None:
        """The helper has ended, and the kernel has killed its workers."""
        self._is_lost = True
        for handle in [*self._running.values(), *(handle for queue in self._unstarted.values() for handle in queue)]:
            handle._exit_code = -signal.SIGKILL
            self._add_dead(DeadWorker(handle.number, handle._pid or 0, None, None))
        self._running.clear()
        self._unstarted.clear()

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None) -> None:
        """Block until something is so, or the helper is gone, or the time is over. Any thread."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.pump()
            if is_so() or self._is_closed or self._is_lost or (deadline is not None and time.monotonic() >= deadline):
                return
            poller = select.poll()
            for fd in self._helper_fds():
                poller.register(fd, select.POLLIN)
            poller.poll(None if deadline is None else max(int((deadline - time.monotonic()) * 1000), 0) + 1)

    def vouch(self, handle: WorkerHandle) -> None:
        if handle._pid is not None:
            self._tell(Vouch(handle._pid))

    def leave(self, handle: WorkerHandle) -> None:
        with self._lock:
            if not self._is_closed and handle.pid is not None:
                self._tell(Leave(handle.pid))

    def close(self) -> None:
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._tell(Quit())
        if not self._wait_for_helper(3 * GRACE_MS):
            children.kill(self._helper_pid, signal.SIGKILL)  # stopped by somebody: its workers end with it
            self._wait_for_helper(None)
        self.pump()
        try:
            os.waitpid(self._helper_pid, 0)
        except ChildProcessError:  # the program ignores SIGCHLD, or has reaped it with a wait for any child
            pass
        with self._lock:
            self._is_closed = True
            self._lose_helper()
            for worker in self._dead:
                if worker.replacement is not None:
                    worker.replacement[0].close()
            self._channel.close()
            children.close_all((self._pidfd, self._news_fd))

    def close_in_child(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._is_closed = True
        self._channel.close()
        children.close_all((self._pidfd, self._news_fd))

    def _wait_for_helper(self, limit_ms: int | None) -> bool:
        """Whether the helper has ended in time; what it says meanwhile is read, or it would block."""
        deadline = None if limit_ms is None else time.monotonic() + limit_ms / 1000
        while True:
            left_ms = None if deadline is None else max(int((deadline - time.monotonic()) * 1000), 0)
            poller = select.poll()
            for fd in [self._pidfd] if self._is_lost else self._helper_fds():
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(left_ms)}
            if self._pidfd in ready:
                return True
            if not ready:
                return False
            self.pump()


def _exit_code(process: Any) -> int:
    """How a process that is gone has ended; unknown where the program has reaped it, or ignores SIGCHLD."""
    if process.exitcode is None:  # a fork server has still to tell it
        process.join(_EXIT_CODE_LIMIT_S)
    if process.exitcode is None:  # or multiprocessing would take it to be alive for ever, and keep its descriptors
        process._popen.returncode = _UNKNOWN_EXIT
    process.is_alive()  # multiprocessing lets go of it
    code: int = process.exitcode
    return code


class ProcessCrew:
    """Workers as processes of a multiprocessing context.

    Args:
        context: Spawn or forkserver; any context works.
        target: Runs the worker; importable by name.
        make_args: Given a worker's number and its socket, the arguments of ``target``.
        trainer_fd: A pidfd of this process, owned by the crew.
    """

    def __init__(
        self,
        context: Any,
        target: Callable[..., None],
        make_args: Callable[[int, Any], tuple[Any, ...]],
        trainer_fd: int,
    ) -> None:
        self._owner_pid = os.getpid()
        self._trainer_fd = trainer_fd
        self._context, self._target, self._make_args = context, target, make_args
        #: Each with a pidfd, by which its end is seen: a child of its own may hold the pipe of multiprocessing open.
        self._processes: list[tuple[int, Any, int]] = []
        self._is_closed = False

    def start(self, number: int) -> tuple[Channel, Any]:
        trainers, workers = Channel.pair()
        with workers:
            process = self._context.Process(target=self._target, args=self._make_args(number, workers), daemon=True)
            try:
                process.start()
            except (TypeError, AttributeError, PicklingError):
                trainers.close()
                warnings.warn(
                    "Got pickle error when attempting to start a worker Process. This might be because the worker "
                    "Process arguments are not picklable. Python 3.14+ changed the multiprocessing start method in "
                    "non-Mac POSIX platforms to 'forkserver', which requires the worker Process arguments to be "
                    "picklable. You can also try multiprocessing.set_start_method('fork').",
                    stacklevel=2,
                )
                raise
            except BaseException:
                trainers.close()
                raise
        self._processes.append((number, process, os.pidfd_open(process.pid)))
        return Channel(trainers, is_blocking=False), process

    def fds(self) -> list[int]:
        return [pidfd for _, _, pidfd in self._processes]

    def dead(self) -> list[DeadWorker]:
        poller = select.poll()
        for pidfd in self.fds():
            poller.register(pidfd, select.POLLIN)
        gone = dict(poller.poll(0))
        ended = [entry for entry in self._processes if entry[2] in gone]
        self._processes = [entry for entry in self._processes if entry[2] not in gone]
        children.close_all([pidfd for _, _, pidfd in ended])
        return [DeadWorker(number, process.pid, _exit_code(process), None) for number, process, _ in ended]

    def vouch(self, handle: Any) -> None:
        pass

    def leave(self, handle: Any) -> None:
        pass

    def close(self) -> None:
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._is_closed = True
        for end in (lambda _: None, lambda process: process.terminate(), lambda process: process.kill()):
            left = [process for _, process, pidfd in self._processes if not children.wait_gone(pidfd, 0)]
            for process in left:
                end(process)
            deadline = time.monotonic() + GRACE_MS / 1000
            for _, _, pidfd in self._processes:
                children.wait_gone(pidfd, max(int((deadline - time.monotonic()) * 1000), 0))
        for _, process, pidfd in self._processes:
            if children.wait_gone(pidfd, 0):
                _exit_code(process)
        self._close_fds()

    def close_in_child(self) -> None:
        self._is_closed = True
        self._close_fds()

    def _close_fds(self) -> None:
        children.close_all([self._trainer_fd, *self.fds()])
        self._processes.clear()
