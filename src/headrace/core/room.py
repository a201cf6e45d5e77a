"""How many bytes of memory a loader may still take, from the numbers of all limits around it.

Pure. Pages of a memfd that are touched beyond a cgroup's limit end in SIGKILL, not in an error (measured for populate,
fallocate and plain writing); so room is computed before a segment is made. A limit's room is what it has not used,
and what it has used for clean, inactive file cache, which the kernel gives up on demand.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.units import size

#: Kept free below each limit: other processes allocate between the reading and the touching.
_RESERVE_FRAC = 1 / 64
_RESERVE_MAX_BYTES = 64 << 20
#: Default share of the room that all loaders of all local ranks may have together.
DEFAULT_SHARE_FRAC = 0.5


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """One limit around the process, with its numbers at one moment.

    Attributes:
        name: For messages: "cgroup /sys/fs/cgroup/user.slice", "machine".
        limit_bytes: The limit.
        usage_bytes: What counts against it.
        inactive_file_bytes: Of these, file cache that was not used lately.
    """

    name: str
    limit_bytes: int
    usage_bytes: int
    inactive_file_bytes: int

    @property
    def free_bytes(self) -> int:
        """What can be taken before the kernel kills; not negative."""
        return max(self.limit_bytes - self.usage_bytes + min(self.inactive_file_bytes, self.usage_bytes), 0)

    @property
    def reserve_bytes(self) -> int:
        """What we leave untouched of that."""
        return min(int(self.limit_bytes * _RESERVE_FRAC), _RESERVE_MAX_BYTES)


@dataclass(frozen=True, slots=True)
class Room:
    """What may be taken, and which limit says so (None: no number can be had, so nothing is refused)."""

    free_bytes: int
    tightest: MemoryLevel | None


def machine_level(total_bytes: int, available_bytes: int) -> MemoryLevel:
    """The machine as a level, from ``MemTotal`` and ``MemAvailable``."""
    return MemoryLevel("the machine", total_bytes, total_bytes - available_bytes, 0)


def room(levels: list[MemoryLevel]) -> Room:
    """The tightest of all limits.

    Args:
        levels: The machine, and each enclosing cgroup that has a limit.
    """
    if not levels:
        return Room(1 << 62, None)
    free, tightest = min(
        ((max(level.free_bytes - level.reserve_bytes, 0), level) for level in levels), key=lambda pair: pair[0]
    )
    return Room(free, tightest)


def budget_bytes(
    found: Room,
    *,
    own_bytes: int,
    num_local_ranks: int,
    num_loaders: int,
    memory_limit_bytes: int | None = None,
    share_frac: float = DEFAULT_SHARE_FRAC,
) -> int:
    """What one loader's slots may have together.

    Args:
        found: The room that is left now.
        own_bytes: What this loader's slots have already; it is part of the room that they may use.
        num_local_ranks: Ranks on this machine, each with the same loaders.
        num_loaders: Live loaders of this process, this one included.
        memory_limit_bytes: The user's own limit, which takes the place of the share but not of the room.
        share_frac: Of the room, 0..1.
    """
    if memory_limit_bytes is not None:
        return min(memory_limit_bytes, found.free_bytes + own_bytes)
    return int(found.free_bytes * share_frac) // (max(num_local_ranks, 1) * max(num_loaders, 1)) + own_bytes


def refusal(need_bytes: int, found: Room, what: str) -> str | None:
    """Why a segment cannot be made, or None where it fits.

    Args:
        need_bytes: Its size.
        found: The room now.
        what: What it is for: "batch 17".
    """
    level = found.tightest
    if level is None or need_bytes <= found.free_bytes:
        return None
    missing = need_bytes - found.free_bytes
    return (
        f"{what} needs {size(need_bytes)} of shared memory, but {level.name} has {size(found.free_bytes)} left (limit"
        f" {size(level.limit_bytes)}, used {size(level.usage_bytes)}, of which"
        f" {size(level.inactive_file_bytes)} file cache that can go, {size(level.reserve_bytes)} kept free)."
        f" At least {size(missing)} more is needed: raise the limit to"
        f" {size(level.limit_bytes + missing)} or more, or lower batch_size, num_workers or prefetch_factor."
    )
