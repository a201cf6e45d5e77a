"""The control page: what trainer and workers tell each other between two messages, without a system call.

One memfd per pool, mapped by the trainer and by every worker; one line of 128 bytes per worker. Every cell is an
aligned 8-byte integer with one writer:

    TASK, ROW      worker   what it is making now (task number + 1, row + 1; 0: nothing, not known)
    BELL           trainer  goes up by one when one of the cells below was changed: a worker looks at it between samples
    LIMIT, LIMIT_OF trainer rows from LIMIT on of the task LIMIT_OF (its number + 1) are made by others
    NEXT, NEXT_OF  trainer  the same for one more task, which waits behind that one
    NUM_WORKERS    trainer  how many workers there are, for one that starts
    STALE          trainer  tasks with a smaller number are not wanted any more
    STOP           trainer  1: end after this sample
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

TASK, ROW, BELL, LIMIT, LIMIT_OF, NEXT, NEXT_OF, NUM_WORKERS, STALE, STOP = range(10)
_CELLS_PER_LINE = 16
_LINE_BYTES = 128
#: Lines of a page; pages of the memfd that nobody touches take no memory.
MAX_WORKERS = 4096


class ControlPage:
    """The page of one pool. ``fd`` stays open so that it can be handed to workers; ``close`` unmaps and closes it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, MAX_WORKERS * _LINE_BYTES)
        self._cells = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls) -> ControlPage:
        """A new page, all zero. Called by the trainer."""
        fd = os.memfd_create("headrace-control", os.MFD_CLOEXEC)
        os.ftruncate(fd, MAX_WORKERS * _LINE_BYTES)
        return cls(fd)

    def line(self, worker: int) -> memoryview:
        """The cells of one worker."""
        begin = worker * _CELLS_PER_LINE
        return self._cells[begin : begin + _CELLS_PER_LINE]

    def read(self, worker: int, cell: int) -> int:
        """One cell of a worker's line. Called by the trainer."""
        return self._cells[worker * _CELLS_PER_LINE + cell]

    def reset(self, worker: int) -> None:
        """Clear the line of a worker that is gone, for the next one with its number. Called by the trainer."""
        for cell in (TASK, ROW, LIMIT, LIMIT_OF, NEXT, NEXT_OF, STOP):
            self._cells[worker * _CELLS_PER_LINE + cell] = 0

    def ring(self, worker: int, cells: Mapping[int, int] | None = None) -> None:
        """Write cells of a worker's line, then ring its bell. Called by the trainer."""
        begin = worker * _CELLS_PER_LINE
        for cell, value in (cells or {}).items():
            self._cells[begin + cell] = value
        self._cells[begin + BELL] += 1

    def close(self) -> None:
        """Unmap the page and close its descriptor. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self._cells.release()
            self._map.close()
        except BufferError:  # a thread that is stuck in a sample still looks at its line; the map ends with it
            pass
