"""Where a worker's process begins under spawn and forkserver. Imports nothing heavy before the guard stands.

Process(target=run_process, args=(Guard, ...))   unpickled in this order: the guard's thread waits for the trainer's
                                                 end while torch is being imported and the dataset is unpickled
"""

from __future__ import annotations

import os
import pickle
import socket
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from typing import Any

from headrace.host import children


class Descriptor:
    """A descriptor that goes to a child; it arrives as an object with ``detach()``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        # In Process.start(), which is where this is pickled, the descriptor is inherited and nothing has to serve it.
        return _same, (reduction.DupFd(self._fd),)


class Guard(Descriptor):
    """A pidfd of the trainer; the child watches it from the moment in which this is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _stand_guard, (reduction.DupFd(self._fd),)


class Sealed:
    """Something that is unpickled only when the child asks for it, so that it can report a failure."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        # Inside Process.start() locks and queues of multiprocessing can be pickled, and nowhere else.
        return _same, (bytes(ForkingPickler.dumps(self._value)),)


def _same(value: Any) -> Any:
    return value


def _stand_guard(duplicate: Any) -> None:
    children.ignore_interrupts()
    children.watch_from_thread(duplicate.detach())


def run_process(_guard: None, number: int, sock: socket.socket, page: Any, stack: Any, sealed: bytes) -> None:
    """The body of a worker's process."""
    children.prefer_for_oom_killer()
    from headrace.loader import worker
    from headrace.loader.control import ControlPage

    try:
        setup = pickle.loads(sealed)
    except Exception as error:  # noqa: BLE001 - the user's classes; the loop gets the error
        worker.refuse_tasks(number, sock, error)
        os._exit(0)  # nothing that was half unpickled may keep the process
    worker.run_worker(number, sock, ControlPage(page.detach()), setup, stack.detach())
