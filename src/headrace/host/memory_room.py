"""Reads what ``core.room`` reckons with: the memory limits around this process, each with its use at this moment.

Cgroups of version 1 and 2, every level that can be seen, and the machine. A reading costs the kernel some 0.1 ms per
level (it sums its counters over all CPUs): for the making of a segment, not for every batch.
"""

from __future__ import annotations

from headrace.core.room import MemoryLevel, machine_level
from headrace.host.cgroup import (
    UNLIMITED_BYTES,
    Level,
    locate,
    memory_limit_bytes,
    parse_flat,
    parse_memberships,
    read_number,
)
from headrace.host.procfs import Mount, Reader, parse_mountinfo, read_text


class MemoryLimits:
    """The memory limits around this process. A fork may use its parent's. One thread at a time.

    Args:
        read: How files are read.
        mounts: Of this process, by default those in ``/proc/self/mountinfo``.
    """

    def __init__(self, read: Reader = read_text, mounts: list[Mount] | None = None) -> None:
        self._read = read
        if mounts is None:
            mounts = parse_mountinfo(read("/proc/self/mountinfo") or "")
        self._cgroups = locate("memory", parse_memberships(read("/proc/self/cgroup") or ""), mounts)

    def levels(self) -> list[MemoryLevel]:
        """The machine and every cgroup with a limit, as they are now; what cannot be read is left out."""
        found = [_read_level(level, self._read) for level in self._cgroups]
        return [level for level in [_read_machine(self._read), *found] if level is not None]


def _read_machine(read: Reader) -> MemoryLevel | None:
    rows = (line.split() for line in (read("/proc/meminfo") or "").splitlines())
    kib = {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        return None
    return machine_level(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)


def _read_level(level: Level, read: Reader) -> MemoryLevel | None:
    stat = parse_flat(read(f"{level.directory}/memory.stat") or "")
    if level.version == 2:
        # Beyond memory.high the kernel throttles allocations until next to nothing goes on.
        limits = [memory_limit_bytes(level), read_number(f"{level.directory}/memory.high", read)]
        usage, cache = read_number(f"{level.directory}/memory.current", read), stat.get("inactive_file")
    else:
        # The tightest of all levels above, also of those that a container does not show.
        limits = [memory_limit_bytes(level), stat.get("hierarchical_memory_limit")]
        usage = read_number(f"{level.directory}/memory.usage_in_bytes", read)
        cache = stat.get("total_inactive_file", stat.get("inactive_file"))
    limit = min((value for value in limits if value is not None and value < UNLIMITED_BYTES), default=None)
    if limit is None or usage is None:
        return None
    return MemoryLevel(f"cgroup {level.directory}", limit, usage, cache or 0)
