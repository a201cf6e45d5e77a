"""One process's record: a mapped file of 64-byte events and, beside it, JSON lines.

Owned by one process; any of its threads may call ``event``. Nothing blocks and nothing is buffered: what was written is
in the page cache at once, so a SIGKILL loses nothing. The numbers repeat ``headrace.records.rundir``.
"""

import itertools
import mmap
import os
import struct
import sys
import threading

MAGIC = 0x3145434152444148
HEADER_BYTES = 4096
EVENT_BYTES = 64
HEAD_EVENTS = 131072
RING_EVENTS = 262144
CHUNK_EVENTS = 4096
NONE = (1 << 64) - 1
CELL_MAGIC, CELL_NUM_EVENTS, CELL_PID, CELL_START_NS, CELL_HOOK_NS, CELL_NUM_STEPS = range(6)

_MAX_EVENTS = HEAD_EVENTS + RING_EVENTS
_FILE_BYTES = HEADER_BYTES + _MAX_EVENTS * EVENT_BYTES
_pack_into = struct.Struct("<8Q").pack_into
# A map keeps a duplicate of its descriptor; since Python 3.13 it need not, and the program has fewer of ours.
_MAP_OPTIONS = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, madvise(2)
_kept: list[mmap.mmap] = []


def _let_go(mapped, name):
    """Called before a map is dropped, which closes its descriptor: that must still be the file ``name``.

    A program that becomes a daemon closes every descriptor, and the number may be a file of its own by now. Then the
    map is kept.
    """
    if mapped is None or _MAP_OPTIONS:
        return
    for fd in os.listdir("/proc/self/fd"):
        try:
            if name in os.readlink("/proc/self/fd/" + fd):
                return
        except OSError:
            pass  # the descriptor of the listing itself
    _kept.append(mapped)


def _map(fd, num_bytes):
    """Maps a file. Before Python 3.13 a map keeps a descriptor, never one of the program's closed 0, 1 and 2."""
    held: list[int] = []
    try:
        while not held or held[-1] <= 2:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return mmap.mmap(fd, num_bytes, **_MAP_OPTIONS)
    finally:
        for number in held:
            os.close(number)


def _populate(mapped, start, end):
    """Has the kernel make a range writable in one call.

    Else every 64th event pays for a page's first write; where the file is on a disk that takes 100 us or more (ext4
    notes the time of the change in its journal), which is 3 us per step.
    """
    try:
        mapped.madvise(_POPULATE_WRITE, start - start % mmap.PAGESIZE, end - start + start % mmap.PAGESIZE)
    except (OSError, ValueError):
        pass  # before Linux 5.14


class Writer:
    """``<pid>-<start ns>.ev`` and ``.meta`` in a run directory. Files appear with the first event or line."""

    def __init__(self, run_dir, start_ns):
        self.pid = os.getpid()
        self.start_ns = start_ns
        self.base = os.path.join(run_dir, "%d-%d" % (self.pid, start_ns))
        self.broken = None
        self._lock = threading.RLock()  # a signal handler of the user's may come back here
        self._map = None
        self._cells = None
        self._next = itertools.count().__next__
        self._allocated = self._plain = 0

    def event(self, kind, t0, t1, a=0, b=0, c=0, d=0, e=0):
        """Writes one event; fields are non-negative and below 2**64. Never raises. About 0.3 us."""
        n = self._next()
        if n < self._plain:
            at = HEADER_BYTES + n * EVENT_BYTES
        elif n < self._allocated or self._grow(n):
            slot = n if n < HEAD_EVENTS else HEAD_EVENTS + (n - HEAD_EVENTS) % RING_EVENTS
            at = HEADER_BYTES + slot * EVENT_BYTES
        else:
            return
        try:
            # None only once closed, and then the TypeError is caught: a test for None would cost every event.
            # Zeros first, then the fields: nobody reads an event before the counter says that it is there.
            _pack_into(self._map, at, kind, t0, t1, a, b, c, d, e)  # type: ignore[arg-type]  # see above
            self._cells[CELL_NUM_EVENTS] = n + 1  # type: ignore[index]  # see above
        except struct.error:
            # A field is no such number, and the fields before it stand there already: kind 0 is no event.
            try:
                _pack_into(self._map, at, 0, 0, 0, 0, 0, 0, 0, 0)  # type: ignore[arg-type]  # see above
            except (TypeError, ValueError):
                pass
        except (TypeError, ValueError):
            pass  # another thread closed this writer meanwhile: one event is lost

    def put(self, cell, value):
        """Sets a counter in the header (one writer thread each)."""
        cells = self._cells
        if cells is not None:
            cells[cell] = value

    def add(self, cell, value):
        """Adds to a counter in the header (one writer thread each)."""
        cells = self._cells
        if cells is not None:
            cells[cell] += value

    def line(self, text):
        """Appends one line to the ``.meta`` file in a single write."""
        if self.broken:
            return
        fd = os.open(self.base + ".meta", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, (text + "\n").encode("utf-8", "replace"))
        finally:
            os.close(fd)

    def _grow(self, n):
        # Blocks are reserved before they are touched: writing a hole of a full disk through a map is a SIGBUS.
        with self._lock:
            if self.broken:
                return False
            try:
                if n >= _MAX_EVENTS:
                    self._allocated = 1 << 62
                    return True
                while n >= self._allocated:
                    self._reserve()
            except (OSError, ValueError) as error:
                self._give_up("%s: %s" % (type(error).__name__, getattr(error, "strerror", None)))
                return False
        return True

    def _give_up(self, why):
        self._allocated = self._plain = 0
        try:
            self.line('{"k": "error", "where": "events", "text": "%s"}' % why)
        except OSError:
            pass
        self.broken = why

    def _reserve(self):
        fd = os.open(self.base + ".ev", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            start = self._allocated * EVENT_BYTES + (HEADER_BYTES if self._allocated else 0)
            end = HEADER_BYTES + min(self._allocated + CHUNK_EVENTS, _MAX_EVENTS) * EVENT_BYTES
            os.posix_fallocate(fd, start, end - start)
            if self._map is None:
                os.ftruncate(fd, _FILE_BYTES)
                self._map = _map(fd, _FILE_BYTES)
                self._cells = memoryview(self._map).cast("Q")
                self._cells[CELL_PID] = self.pid
                self._cells[CELL_START_NS] = self.start_ns
                self._cells[CELL_MAGIC] = MAGIC
            _populate(self._map, start, end)
        finally:
            os.close(fd)
        self._allocated = min(self._allocated + CHUNK_EVENTS, _MAX_EVENTS)
        self._plain = min(self._allocated, HEAD_EVENTS)  # below this, an event's number says where it goes

    def finish(self):
        """Closes, and gives back what was reserved and not used: workers come and go with every epoch."""
        used = 0 if self._cells is None else min(self._cells[CELL_NUM_EVENTS], _MAX_EVENTS)
        self.close()
        if used:
            try:
                os.truncate(self.base + ".ev", HEADER_BYTES + used * EVENT_BYTES)
            except OSError:
                pass  # the directory is gone, and its files with it

    def close(self):
        """Unmaps, as soon as no other thread is in the middle of a write; later calls are ignored."""
        self.broken = self.broken or "closed"
        self._allocated = self._plain = 0
        _let_go(self._map, os.path.basename(self.base) + ".ev")
        self._cells = self._map = None


class Control:
    """The 4 KiB of cells that the agents of one run share. Missing file: every read gives 0, writes go nowhere."""

    STOP, SAMPLE_UNTIL_NS, MAX_STEPS, WARMUP_STEPS = range(4)

    def __init__(self, run_dir):
        self.cells: list[int] | memoryview[int] = [0] * 8
        self._map = None
        self._path = os.path.join(run_dir, "control")
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self._map = _map(fd, 4096)
            self.cells = memoryview(self._map).cast("Q")
        except (OSError, ValueError):
            pass
        finally:
            os.close(fd)

    def close(self):
        """Unmaps when nobody reads any more; every later read says stop."""
        _let_go(self._map, os.sep.join(self._path.split(os.sep)[-2:]))
        self.cells, self._map = [1] + [0] * 7, None
