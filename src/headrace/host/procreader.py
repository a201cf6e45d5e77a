"""Reads the same processes again and again, cheaply: opening a file of ``/proc`` costs many times what reading it does.

A look at 10 processes with 10 threads is 130 files.
"""

from __future__ import annotations

import os
import resource

from headrace.host import procfs
from headrace.host.procfs import Schedstat, Stat
from headrace.host.proctree import ProcessTree
from headrace.records.rundir import ProcSample

#: At most this many files stay open, and at most half of the descriptors that we may have; others are opened each time.
_MAX_FILES = 600
_CHUNK_BYTES = 8192
#: Every so many looks ``/proc`` and the threads are listed and ``status`` (the costliest text) is read.
_LOOKS_PER_PASS = 4


class Files:
    """Small files of ``/proc`` that stay open. One thread owns it; `close` lets everything go and may be repeated."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._used: set[str] = set()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = _MAX_FILES if soft == resource.RLIM_INFINITY else min(_MAX_FILES, soft // 2)

    def read(self, path: str) -> str | None:
        """The text now; None when the process is gone (the kernel says ESRCH on a file that is still open)."""
        fd = self._fds.get(path)
        if fd is None:
            if len(self._fds) >= self._limit:
                return procfs.read_text(path)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
            self._fds[path] = fd
        self._used.add(path)
        try:
            data = chunk = os.pread(fd, _CHUNK_BYTES, 0)
            while len(chunk) == _CHUNK_BYTES:  # only /proc/stat of a machine with many cores is longer
                chunk = os.pread(fd, _CHUNK_BYTES, len(data))
                data += chunk
            return data.decode("utf-8", "replace")
        except OSError:
            os.close(self._fds.pop(path))
            return None

    def sweep(self) -> None:
        """Close what was not read since the last sweep."""
        for path in self._fds.keys() - self._used:
            os.close(self._fds.pop(path))
        self._used.clear()

    def close(self) -> None:
        """Close everything."""
        self._used.clear()
        self.sweep()


class ProcReader:
    """All processes of a program, one look at a time.

    Descriptors stay open between looks. New processes are found every few looks: what they counted since their start is
    not lost by that. The threads of a process are listed again then, when their number changes, and when one is gone.

    Args:
        root_pid: The program's first process.
    """

    def __init__(self, root_pid: int) -> None:
        self._files = Files()
        self._tree = ProcessTree(root_pid, self._files.read)
        self._threads: dict[int, list[int]] = {}
        self._looks = 0

    def read(self, memory: bool = False, thorough: bool = False) -> list[ProcSample]:
        """All processes now, the root first; empty when the program is gone.

        Args:
            memory: Also read ``smaps_rollup``.
            thorough: Look for new processes and threads and read ``status``; else that is done every few looks.
        """
        thorough = thorough or self._looks % _LOOKS_PER_PASS == 0
        self._looks += 1
        pids = self._tree.refresh(thorough)
        if thorough:
            self._threads.clear()
        samples = [self._read(self._tree.stats[pid], thorough, memory) for pid in pids]
        self._files.sweep()
        return samples

    def _read(self, stat: Stat, detail: bool, memory: bool) -> ProcSample:
        sample = procfs.make_proc_sample(stat, self._schedstats(stat))
        procfs.add_io(sample, procfs.read_io(stat.pid, self._files.read))
        if detail:
            procfs.add_status(sample, procfs.read_status(stat.pid))
        if memory:
            procfs.add_memory(sample, procfs.read_smaps_rollup(stat.pid))
        return sample

    def _schedstats(self, stat: Stat) -> dict[int, Schedstat]:
        pid = stat.pid
        tids = self._threads.get(pid, [])
        if len(tids) != stat.num_threads:
            tids = self._threads[pid] = [pid] if stat.num_threads == 1 else procfs.list_numbers(f"/proc/{pid}/task")
        found = {t: one for t in tids if (one := procfs.read_schedstat(pid, t, self._files.read)) is not None}
        if len(found) != len(tids):
            self._threads.pop(pid, None)
        return found

    def close(self) -> None:
        """Close what is open; may be called twice."""
        self._files.close()
