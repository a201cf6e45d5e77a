"""``/proc`` of other processes: parsers that take text, readers that answer None once the process is gone.

Nothing here touches the processes: no signal, no ptrace, no attach. Files are read with ``os.open``/``os.read``
because a sample of 10 processes with 10 threads is 130 files, and the buffered ``open`` costs twice as much per file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.records.rundir import ProcSample

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: A path in, the text out, None when it can not be had.
Reader = Callable[[str], str | None]
_CHUNK_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Stat:
    """``/proc/PID/stat``, the fields used. ``start_ticks`` with the pid names a process until the machine boots."""

    pid: int
    comm: str
    state: str
    ppid: int
    pgrp: int
    session: int
    minor_faults: int
    major_faults: int
    user_ns: int
    system_ns: int
    num_threads: int
    start_ticks: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Schedstat:
    """``schedstat`` of a thread: time on a core and time ready without one, totals in ns.

    Time throttled by a cgroup quota counts as ``run_queue_ns`` (measured on Linux 6.18: a thread under a quota of half
    a core shows 0.51 on a core and 0.49 in the run queue, as in older kernels).
    """

    on_cpu_ns: int
    run_queue_ns: int


@dataclass(frozen=True, slots=True)
class Io:
    """``/proc/PID/io``: ``rchar`` is what was asked for, ``read_bytes`` what really came from a block device."""

    rchar_bytes: int
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """``/proc/PID/status``, the fields used. Context switches are the main thread's own."""

    voluntary_switches: int | None
    involuntary_switches: int | None
    num_allowed_cpus: int | None
    name: str | None


@dataclass(frozen=True, slots=True)
class SmapsRollup:
    """``/proc/PID/smaps_rollup``: memory that belongs to this process alone, and what of it was swapped out."""

    private_dirty_bytes: int
    swap_bytes: int


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of ``mountinfo``. ``root`` is the part of the file system that stands at ``point``."""

    root: str
    point: str
    fs_type: str
    options: tuple[str, ...]


def parse_stat(text: str) -> Stat:
    """Parse ``/proc/PID/stat``. The name may hold spaces and parentheses: it ends at the last one."""
    head, _, rest = text.rpartition(")")
    pid, _, comm = head.partition(" (")
    f = rest.split()
    return Stat(
        pid=int(pid),
        comm=comm,
        state=f[0],
        ppid=int(f[1]),
        pgrp=int(f[2]),
        session=int(f[3]),
        minor_faults=int(f[7]),
        major_faults=int(f[9]),
        user_ns=int(f[11]) * _TICK_NS,
        system_ns=int(f[12]) * _TICK_NS,
        num_threads=int(f[17]),
        start_ticks=int(f[19]),
        rss_bytes=max(int(f[21]), 0) * _PAGE_BYTES,
    )


def parse_schedstat(text: str) -> Schedstat:
    """Parse ``schedstat`` of a thread: on-CPU ns, run-queue ns, number of slices."""
    on_cpu, run_queue = text.split()[:2]
    return Schedstat(on_cpu_ns=int(on_cpu), run_queue_ns=int(run_queue))


def parse_io(text: str) -> Io:
    """Parse ``/proc/PID/io``."""
    values = dict(_pairs(text))
    return Io(int(values["rchar"]), int(values["read_bytes"]), int(values["write_bytes"]))


def parse_status(text: str) -> Status:
    """Parse ``/proc/PID/status``; a line the kernel does not write is None."""
    values = dict(_pairs(text))
    voluntary, involuntary = values.get("voluntary_ctxt_switches"), values.get("nonvoluntary_ctxt_switches")
    cpus = values.get("Cpus_allowed_list")
    return Status(
        voluntary_switches=None if voluntary is None else int(voluntary),
        involuntary_switches=None if involuntary is None else int(involuntary),
        num_allowed_cpus=None if cpus is None else len(parse_cpu_list(cpus)),
        name=values.get("Name"),
    )


def parse_smaps_rollup(text: str) -> SmapsRollup:
    """Parse ``/proc/PID/smaps_rollup`` (values stand in kB there)."""
    values = dict(_pairs(text))
    return SmapsRollup(_kb(values["Private_Dirty"]), _kb(values["Swap"]))


def parse_cpu_list(text: str) -> set[int]:
    """Parse ``0-3,8`` as the kernel writes sets of CPUs."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse ``mountinfo``; blanks in paths stand there as octal escapes."""
    mounts = []
    for line in text.splitlines():
        fields, _, tail = line.partition(" - ")
        left, right = fields.split(" "), tail.split(" ")
        mounts.append(Mount(_unescape(left[3]), _unescape(left[4]), right[0], tuple(right[-1].split(","))))
    return mounts


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key, value.strip()


def _kb(value: str) -> int:
    return int(value.split()[0]) * 1024


def _unescape(path: str) -> str:
    if "\\" not in path:
        return path
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def read_text(path: str) -> str | None:
    """The whole text of a small kernel file; None when it is not there, gone or not ours to read.

    Blocks as long as the kernel does. ESRCH (the process ended between open and read) is an ``OSError`` as well.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = b""
        # Kernel files give a page at a time or less: a short read is no end, only an empty one is.
        while chunk := os.read(fd, _CHUNK_BYTES):
            data += chunk
    except OSError:
        return None
    finally:
        os.close(fd)
    return data.decode("utf-8", "replace")


def list_numbers(directory: str) -> list[int]:
    """The entries of a ``/proc`` directory that are numbers (pids, threads, descriptors); empty when it is gone."""
    try:
        return [int(name) for name in os.listdir(directory) if name.isdigit()]
    except OSError:
        return []


def read_stat(pid: int, read: Reader | None = None) -> Stat | None:
    """``/proc/PID/stat`` now, or None when the process is gone."""
    text = (read or read_text)(f"/proc/{pid}/stat")
    return parse_stat(text) if text else None


def read_schedstat(pid: int, tid: int, read: Reader | None = None) -> Schedstat | None:
    """``schedstat`` of one thread now; None when it is gone or the kernel has no schedstats."""
    text = (read or read_text)(f"/proc/{pid}/task/{tid}/schedstat")
    return parse_schedstat(text) if text else None


def read_io(pid: int, read: Reader | None = None) -> Io | None:
    """``/proc/PID/io`` now; None when the process is gone or another user's."""
    text = (read or read_text)(f"/proc/{pid}/io")
    return parse_io(text) if text else None


def read_status(pid: int) -> Status | None:
    """``/proc/PID/status`` now, or None when the process is gone."""
    text = read_text(f"/proc/{pid}/status")
    return parse_status(text) if text else None


def read_smaps_rollup(pid: int) -> SmapsRollup | None:
    """``smaps_rollup`` now. The kernel walks the page tables for it (ms per GiB): read it rarely."""
    text = read_text(f"/proc/{pid}/smaps_rollup")
    # A zombie and a kernel thread have an empty file.
    return parse_smaps_rollup(text) if text else None


def read_mounts(pid: int | str = "self") -> list[Mount]:
    """The mounts that a process sees; empty when it is gone or may not be read."""
    return parse_mountinfo(read_text(f"/proc/{pid}/mountinfo") or "")


def read_cmdline(pid: int) -> list[str] | None:
    """The arguments of a process; None when it is gone; empty for a zombie or a kernel thread."""
    text = read_text(f"/proc/{pid}/cmdline")
    return None if text is None else text.rstrip("\0").split("\0") if text else []


def read_environ(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with; None when it is gone or another user's."""
    text = read_text(f"/proc/{pid}/environ")
    if text is None:
        return None
    return {key: value for key, eq, value in (entry.partition("=") for entry in text.split("\0")) if eq}


def read_proc(pid: int, memory: bool = False) -> ProcSample | None:
    """One process now: its main thread apart from all its other threads.

    Args:
        pid: The process.
        memory: Also read ``smaps_rollup``, which is slow for a large process.

    Returns:
        None when the process is gone. A zombie has no threads left: those fields are None.
    """
    stat = read_stat(pid)
    if stat is None:
        return None
    tids = list_numbers(f"/proc/{pid}/task")
    sample = make_proc_sample(stat, {tid: one for tid in tids if (one := read_schedstat(pid, tid)) is not None})
    add_io(sample, read_io(pid))
    add_status(sample, read_status(pid))
    if memory:
        add_memory(sample, read_smaps_rollup(pid))
    return sample


def make_proc_sample(stat: Stat, threads: dict[int, Schedstat]) -> ProcSample:
    """A sample from ``stat`` and the threads alive; a thread that ends takes its share of the sum with it."""
    main = threads.get(stat.pid)
    others = [one for tid, one in threads.items() if tid != stat.pid]
    return ProcSample(
        pid=stat.pid,
        ppid=stat.ppid,
        comm=stat.comm,
        state=stat.state,
        num_threads=stat.num_threads,
        on_cpu_ns=main.on_cpu_ns if main else None,
        run_queue_ns=main.run_queue_ns if main else None,
        others_on_cpu_ns=sum(one.on_cpu_ns for one in others) if main else None,
        others_run_queue_ns=sum(one.run_queue_ns for one in others) if main else None,
        user_ns=stat.user_ns,
        system_ns=stat.system_ns,
        minor_faults=stat.minor_faults,
        major_faults=stat.major_faults,
        rss_bytes=stat.rss_bytes,
    )


def add_io(sample: ProcSample, io: Io | None) -> None:
    """Fill in what ``io`` says; it stays None for another user's process."""
    if io is not None:
        sample.read_bytes, sample.rchar_bytes, sample.write_bytes = io.read_bytes, io.rchar_bytes, io.write_bytes


def add_status(sample: ProcSample, status: Status | None) -> None:
    """Fill in what ``status`` says."""
    if status is not None:
        sample.voluntary_switches = status.voluntary_switches
        sample.involuntary_switches = status.involuntary_switches
        sample.num_allowed_cpus = status.num_allowed_cpus


def add_memory(sample: ProcSample, rollup: SmapsRollup | None) -> None:
    """Fill in what ``smaps_rollup`` says."""
    if rollup is not None:
        sample.private_dirty_bytes, sample.swap_bytes = rollup.private_dirty_bytes, rollup.swap_bytes
