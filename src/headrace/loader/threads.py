"""Workers as threads of the trainer, for datasets that let go of the GIL and draw nothing from the global generators.

A thread runs the same ``Worker`` over the same kind of socket pair and writes to the same slots; only what belongs to a
process is different: it has no seeds of its own but ``get_worker_info().rng``, it cannot die, and it cannot be killed.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from torch.utils.data import _utils

from headrace.loader.channel import Channel
from headrace.loader.crew import DeadWorker

#: What each worker thread gets from ``get_worker_info()``.
_local = threading.local()
_is_installed = False


class ThreadHandle:
    """A worker thread with the face of a ``multiprocessing.Process``."""

    daemon = True

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.name = thread.name

    pid = property(lambda _: os.getpid())
    ident = pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs, then 0."""
        return None if self._thread.is_alive() else 0

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Block until it has ended, for ``timeout`` seconds at most."""
        self._thread.join(timeout)

    def stack(self) -> str:
        """Its Python stack, the innermost frame first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(reversed(traceback.format_stack(frame))) if frame is not None else ""

    def terminate(self) -> None:
        """A thread cannot be ended from outside; it ends with its sample."""

    kill = close = terminate


class ThreadCrew:
    """Worker threads.

    Args:
        run: Runs a worker over its end of the socket pair; returns when it is told to stop.
    """

    def __init__(self, run: Callable[[int, Any], None]) -> None:
        self._run = run
        self._threads: list[threading.Thread] = []
        #: Numbers of workers that something has ended which was no order to stop; readable while there are such.
        self._dead: list[int] = []
        self._lock = threading.RLock()
        self._news_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        install_thread_info()

    def start(self, number: int) -> tuple[Channel, ThreadHandle]:
        trainers, workers = Channel.pair()
        # A daemon: a sample that never ends must not keep the interpreter from ending.
        thread = threading.Thread(
            target=self._run_noting, args=(number, workers), name=f"headrace-worker-{number}", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return Channel(trainers, is_blocking=False), ThreadHandle(thread)

    def _run_noting(self, number: int, sock: Any) -> None:
        """The body of a thread; ``sys.exit()`` in a dataset ends it, which nobody would see otherwise."""
        try:
            self._run(number, sock)
        except BaseException as error:
            sock.close()
            with self._lock:
                if self._news_fd >= 0:
                    self._dead.append(number)
                    os.eventfd_write(self._news_fd, 1)
            if not isinstance(error, SystemExit):
                raise

    def fds(self) -> list[int]:
        return [self._news_fd]

    def dead(self) -> list[DeadWorker]:
        with self._lock:
            numbers, self._dead = self._dead, []
            if numbers:
                os.eventfd_read(self._news_fd)
        return [DeadWorker(number, os.getpid(), 1, None) for number in numbers]

    def vouch(self, handle: Any) -> None:
        pass

    def leave(self, handle: Any) -> None:
        pass

    def close(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._close_news()

    def close_in_child(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._close_news()

    def _close_news(self) -> None:
        with self._lock:
            fd, self._news_fd = self._news_fd, -1
        if fd >= 0:
            os.close(fd)


#: A thread that is stuck in a sample is left behind after this long; it ends when the sample does.
_JOIN_S = 1.0


def install_thread_info() -> None:
    """Let torch's ``get_worker_info()`` answer per thread.

    Everybody has imported that function by its name, so that its code is exchanged and not the function.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    function = _utils.worker.get_worker_info
    function.__globals__["_headrace_local"] = _local
    function.__code__ = _get_worker_info.__code__


def _get_worker_info() -> Any:
    info = getattr(_headrace_local, "info", None)  # type: ignore[name-defined]  # noqa: F821 - in torch's globals
    return _worker_info if info is None else info  # type: ignore[name-defined]  # noqa: F821


def set_thread_info(info: Any) -> None:
    """What ``get_worker_info()`` says in the calling thread."""
    _local.info = info
