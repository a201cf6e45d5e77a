"""The helper: forked by the trainer, it forks the workers, reaps and replaces them, and ends with the trainer.

    trainer <==Start, Vouch, Leave, Quit / Started, Died==> helper --fork--> worker 0, worker 1, ...

The helper holds the dataset as it was when ``iter()`` forked it, so that a replacement sees what the others see. It has
one thread, which sleeps in one ``poll`` over the trainer's pidfd, its socket and a pidfd per worker:

    trainer gone      kill all workers, end
    a worker gone     reap it, fork its replacement unless the last one never got ready, tell the trainer
    Quit              wait for the workers, SIGTERM after the grace, SIGKILL after another, end

The workers get SIGKILL from the kernel when the helper ends, however it ends.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.host import children
from headrace.loader.channel import Channel
from headrace.loader.messages import Died, Leave, Quit, Start, Started, Vouch

#: How long a worker may take over its sample when it is told to end; then SIGTERM, then, after as long again, SIGKILL.
#: Together they must stay under the two seconds in which Ctrl-C ends.
GRACE_MS = 700


@dataclass(frozen=True, slots=True)
class HelperJob:
    """What a helper needs to know.

    Attributes:
        run_worker: Runs a worker in the calling process over its end of the socket pair; returns when told to stop.
        is_replacing: Whether the dead are replaced.
    """

    run_worker: Callable[[int, socket.socket], None]
    is_replacing: bool


def fork_helper(job: HelperJob) -> tuple[int, int, Channel]:
    """Fork the helper from the calling process, in whichever thread.

    Returns:
        Its pid, a pidfd of it, and the trainer's end of its socket pair; the caller owns all three.
    """
    ours, theirs = Channel.pair()
    trainer_fd = os.pidfd_open(os.getpid())
    # A signal that arrives between the fork and the child's first line would run the trainer's handlers twice.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        _flush()
        pid = os.fork()
        if pid == 0:
            _child(job, ours, theirs, trainer_fd, blocked)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(trainer_fd)
    theirs.close()
    return pid, os.pidfd_open(pid), Channel(ours, is_blocking=False)


def _flush() -> None:
    """What lies in the streams' buffers is written once, not once per process."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # none, closed, or a full disk: not ours to report
            pass


def _child(
    job: HelperJob, ours: socket.socket, theirs: socket.socket, trainer_fd: int, mask: Iterable[int]
) -> NoReturn:
    """The helper's process, from its first line to its last."""
    code = 1
    try:
        children.ignore_interrupts()
        handlers = children.ignore_handled_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        ours.close()
        gc.freeze()  # what is there is shared: a collection in a worker would write to all of its pages
        _Helper(job, Channel(theirs, is_blocking=True), trainer_fd, handlers).serve()
        code = 0
    except BaseException:  # noqa: BLE001 - the boundary of the process: nobody above us but the trainer's code
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


class _Worker:
    """A worker as the helper sees it."""

    def __init__(self, number: int, pid: int) -> None:
        self.number, self.pid = number, pid
        self.pidfd = os.pidfd_open(pid)
        #: Replaced without asking: one that the trainer has started, or heard of. So no start that fails is repeated
        #: for ever, and a worker that dies during a long step is replaced at once.
        self.is_vouched_for = True
        self.is_leaving = False


class _Helper:
    """See the picture of the module."""

    def __init__(self, job: HelperJob, channel: Channel, trainer_fd: int, handlers: Mapping[int, Any]) -> None:
        self._job, self._channel, self._trainer_fd = job, channel, trainer_fd
        #: What the program does on signals: in workers too, as with DataLoader, and not here.
        self._handlers = handlers
        self._workers: dict[int, _Worker] = {}
        self._poller = select.poll()
        self._poller.register(trainer_fd, select.POLLIN)
        self._poller.register(channel.fileno(), select.POLLIN)
        self._is_quitting = False

    def serve(self) -> None:
        """Until told to quit and all workers are gone, or the trainer is."""
        deadline_ns, signals = 0, [signal.SIGTERM, signal.SIGKILL]
        while self._workers or not self._is_quitting:
            limit_ms = None
            if self._is_quitting:
                deadline_ns = deadline_ns or time.monotonic_ns() + GRACE_MS * 1_000_000
                limit_ms = max((deadline_ns - time.monotonic_ns()) // 1_000_000, 0) if signals else None
            ready = {fd for fd, _ in self._poller.poll(limit_ms)}
            if self._trainer_fd in ready:
                self._kill_all(signal.SIGKILL)
                return
            if not ready and signals:
                self._kill_all(signals.pop(0))
                deadline_ns += GRACE_MS * 1_000_000
            self._handle(ready)

    def _handle(self, ready: set[int]) -> None:
        if self._channel.fileno() in ready:
            self._read()
        for worker in [worker for fd, worker in self._workers.items() if fd in ready]:
            self._reap(worker)

    def _kill_all(self, number: int) -> None:
        for worker in self._workers.values():
            children.kill(worker.pid, number)

    def _read(self) -> None:
        try:
            received = self._channel.receive()
        except (EOFError, ConnectionError):  # the trainer let go of this pool without a word
            self._quit()
            return
        assert received is not None
        message, _, fds = received
        if isinstance(message, Quit):
            self._quit()
        elif isinstance(message, Start):
            worker = self._fork(message.worker, socket.socket(fileno=fds[0]))
            self._tell(Started(worker.number, worker.pid))
        else:
            assert isinstance(message, Vouch | Leave)
            self._note(message)

    def _note(self, message: Vouch | Leave) -> None:
        for worker in self._workers.values():
            if worker.pid == message.pid:
                worker.is_vouched_for |= isinstance(message, Vouch)
                worker.is_leaving |= isinstance(message, Leave)

    def _quit(self) -> None:
        if not self._is_quitting:
            self._is_quitting = True
            self._poller.unregister(self._channel.fileno())

    def _tell(self, message: Started | Died, fds: Iterable[int] = ()) -> None:
        try:
            self._channel.send(message, fds=list(fds))
        except OSError:  # the trainer has closed its end: there is nobody to tell
            self._quit()

    def _fork(self, number: int, sock: socket.socket) -> _Worker:
        """Fork a worker; its end of the socket pair is closed here."""
        helper_pid = os.getpid()
        process = multiprocessing.get_context("fork").Process(
            target=_run_worker, args=(self._job, number, sock, helper_pid), daemon=True
        )
        pid = os.fork()
        if pid == 0:
            self._become_worker(process)
        sock.close()
        worker = _Worker(number, pid)
        self._workers[worker.pidfd] = worker
        self._poller.register(worker.pidfd, select.POLLIN)
        return worker

    def _become_worker(self, process: multiprocessing.process.BaseProcess) -> NoReturn:
        """Run as multiprocessing's child does: with its name, its finalizers, its daemon flag, its empty stdin."""
        code = 1
        try:
            self._channel.close()
            children.close_all([self._trainer_fd, *self._workers])
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            code = process._bootstrap()  # type: ignore[attr-defined]  # what ForkProcess runs in its child
        finally:
            os._exit(code)

    def _reap(self, worker: _Worker) -> None:
        _, status = os.waitpid(worker.pid, 0)
        self._poller.unregister(worker.pidfd)
        del self._workers[worker.pidfd]
        os.close(worker.pidfd)
        code = children.exit_code(status)
        if self._is_quitting or worker.is_leaving or not (self._job.is_replacing and worker.is_vouched_for):
            self._tell(Died(worker.number, worker.pid, code, 0))
            return
        trainers, workers = Channel.pair()
        with trainers:
            new = self._fork(worker.number, workers)
            new.is_vouched_for = False
            self._tell(Died(worker.number, worker.pid, code, new.pid), [trainers.fileno()])


def _run_worker(job: HelperJob, number: int, sock: socket.socket, helper_pid: int) -> None:
    """The body of a worker's process under fork."""
    children.die_with_parent(helper_pid)
    children.prefer_for_oom_killer()
    job.run_worker(number, sock)
