"""The cgroups around a process, version 1, 2 or both: CPU quota, memory limit, and how often each was hit.

A limit may stand at any level above the process, and the tightest one counts. Paths in ``/proc/PID/cgroup`` are those
of the hierarchy, not of the mount: inside a container only a part of the hierarchy is mounted, so they are made
relative to the ``root`` field of our own ``mountinfo``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from headrace.host.procfs import Mount, Reader, parse_mountinfo, read_text
from headrace.records.rundir import CgroupSample

#: Version 1 writes "no limit" as the largest multiple of a page in 63 bits; no machine has an exbibyte.
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Membership:
    """A line of ``/proc/PID/cgroup``. Version 2 has hierarchy 0 and no controllers."""

    hierarchy: int
    controllers: tuple[str, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Level:
    """A directory of a controller, with its version."""

    directory: str
    version: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The tightest limits around a process; None means no limit at any level that can be seen."""

    version: int | None
    cpu_quota_cores: float | None
    memory_bytes: int | None


def parse_memberships(text: str) -> list[Membership]:
    """Parse ``/proc/PID/cgroup``."""
    rows = (line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2)
    return [Membership(int(number), tuple(filter(None, names.split(","))), path) for number, names, path in rows]


def parse_flat(text: str) -> dict[str, int]:
    """Parse a file of ``key number`` lines, such as ``cpu.stat``."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].lstrip("-").isdigit()}


def parse_cpu_max(text: str) -> float | None:
    """Parse version 2's ``cpu.max`` (``max 100000`` or ``50000 100000``) into cores."""
    quota, _, period = text.strip().partition(" ")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def locate(controller: str, memberships: list[Membership], mounts: list[Mount]) -> list[Level]:
    """The directories of a controller around a process, innermost first.

    Args:
        controller: ``cpu``, ``cpuacct`` or ``memory``.
        memberships: Of the process that is asked about.
        mounts: Of the caller, who reads the files.
    """
    for member in memberships:
        v1 = controller in member.controllers
        if not v1 and (member.hierarchy != 0 or member.controllers or _on_v1(controller, memberships)):
            continue
        mount = next((m for m in mounts if (_holds_v1(m, controller) if v1 else m.fs_type == "cgroup2")), None)
        if mount is not None:
            return [Level(d, 1 if v1 else 2) for d in _up(mount.point, _below(mount, member.path))]
    return []


def _on_v1(controller: str, memberships: list[Membership]) -> bool:
    return any(controller in member.controllers for member in memberships)


def _holds_v1(mount: Mount, controller: str) -> bool:
    return mount.fs_type == "cgroup" and controller in mount.options


def _below(mount: Mount, path: str) -> str:
    """``path`` relative to the mount; the mount's own level when the process sits outside of what is mounted."""
    root = mount.root.rstrip("/")
    if path.startswith("/.."):
        return ""
    if path == root or path.startswith(root + "/"):
        return path[len(root) :].strip("/")
    return ""


def _up(point: str, below: str) -> list[str]:
    parts = below.split("/") if below else []
    directories = [os.path.join(point, *parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [d for d in directories if os.path.isdir(d)]


def cpu_quota_cores(level: Level) -> float | None:
    """The CPU quota set at one level, in cores; None when none is set."""
    if level.version == 2:
        text = read_text(f"{level.directory}/cpu.max")
        return parse_cpu_max(text) if text else None
    quota = read_number(f"{level.directory}/cpu.cfs_quota_us")
    period = read_number(f"{level.directory}/cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def memory_limit_bytes(level: Level) -> int | None:
    """The memory limit set at one level; None when none is set."""
    value = read_number(f"{level.directory}/{'memory.max' if level.version == 2 else 'memory.limit_in_bytes'}")
    return value if value is not None and value < UNLIMITED_BYTES else None


def read_number(path: str, read: Reader = read_text) -> int | None:
    """The only number in a file; None when the file is missing or says ``max``."""
    text = (read(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


class Cgroups:
    """The cgroups around one process. Looks again when the process moves; one thread owns an instance.

    Args:
        pid: The process.
        read: How files that are read at every look are read.
        mounts: The mounts of this process, by default those in ``/proc/self/mountinfo``.
    """

    def __init__(self, pid: int, read: Reader = read_text, mounts: list[Mount] | None = None) -> None:
        self._pid, self._read = pid, read
        self._mounts = parse_mountinfo(read_text("/proc/self/mountinfo") or "") if mounts is None else mounts
        self._text: str | None = None
        self._cpu: list[Level] = []
        self._usage: list[Level] = []
        self._memory: list[Level] = []
        self._tight_cpu: Level | None = None
        self._tight_memory: Level | None = None
        self._searched = False
        self._follow()

    def _follow(self) -> bool:
        """Find the directories again when the process has moved; whether it had."""
        text = self._read(f"/proc/{self._pid}/cgroup")
        if not text or text == self._text:
            return False
        self._text = text
        members = parse_memberships(text)
        self._cpu = locate("cpu", members, self._mounts)
        self._usage = locate("cpuacct", members, self._mounts) or self._cpu
        self._memory = locate("memory", members, self._mounts)
        return True

    def limits(self) -> Limits:
        """The tightest CPU quota and memory limit over all levels, as they are set now."""
        self._follow()
        quotas = [q for level in self._cpu if (q := cpu_quota_cores(level)) is not None]
        sizes = [s for level in self._memory if (s := memory_limit_bytes(level)) is not None]
        versions = {level.version for level in self._cpu + self._memory}
        return Limits(max(versions, default=None), min(quotas, default=None), min(sizes, default=None))

    def sample(self, thorough: bool = True) -> CgroupSample | None:
        """Totals of the level that limits most (the innermost one where none limits); None without any cgroup.

        A process that is gone keeps the levels in which it was last seen.

        Args:
            thorough: Also look for the tightest level again and read the memory's numbers; the kernel sums those up
                over all CPUs at each reading.
        """
        if self._follow() or thorough or not self._searched:
            self._searched = True
            self._tight_cpu = _tightest(self._cpu, cpu_quota_cores)
            self._tight_memory = _tightest(self._memory, memory_limit_bytes)
        if self._tight_cpu is None and self._tight_memory is None:
            return None
        sample = CgroupSample()
        if self._tight_cpu is not None:
            self._read_cpu(sample, self._tight_cpu)
        if self._tight_memory is not None and thorough:
            _read_memory(sample, self._tight_memory)
        return sample

    def _read_cpu(self, sample: CgroupSample, level: Level) -> None:
        stat = parse_flat(self._read(f"{level.directory}/cpu.stat") or "")
        sample.num_throttled = stat.get("nr_throttled")
        if level.version == 2:
            sample.throttled_ns = _times_1000(stat.get("throttled_usec"))
            sample.usage_ns = _times_1000(stat.get("usage_usec"))
            return
        sample.throttled_ns = stat.get("throttled_time")
        # cpu and cpuacct are most often one hierarchy; where they are two, cpuacct's innermost group has the usage.
        same = next((u for u in self._usage if u.directory == level.directory), None)
        usage = same or (self._usage[0] if self._usage else None)
        sample.usage_ns = read_number(f"{usage.directory}/cpuacct.usage", self._read) if usage else None


def _times_1000(value: int | None) -> int | None:
    return None if value is None else value * 1000


def _tightest(levels: list[Level], limit: Callable[[Level], float | None]) -> Level | None:
    """The level with the smallest limit, the innermost one where no level has any."""
    limited = [(value, depth) for depth, level in enumerate(levels) if (value := limit(level)) is not None]
    innermost = levels[0] if levels else None
    return levels[min(limited)[1]] if limited else innermost


def _read_memory(sample: CgroupSample, level: Level) -> None:
    stat = parse_flat(read_text(f"{level.directory}/memory.stat") or "")
    if level.version == 2:
        sample.memory_bytes = read_number(f"{level.directory}/memory.current")
        sample.memory_file_bytes = stat.get("inactive_file")
        sample.memory_limit_hits = parse_flat(read_text(f"{level.directory}/memory.events") or "").get("max")
        return
    sample.memory_bytes = read_number(f"{level.directory}/memory.usage_in_bytes")
    sample.memory_file_bytes = stat.get("total_inactive_file", stat.get("inactive_file"))
    sample.memory_limit_hits = read_number(f"{level.directory}/memory.failcnt")
