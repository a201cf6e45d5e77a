"""A real cgroup with a CPU quota or a memory limit for one process tree, v1 and v2, removed afterwards.

Used by the scripts when a person runs one alone, and by the harness, which puts the whole command inside as a
container engine would. Needs the right to create cgroups; where that is missing, ``Unpermitted`` says why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "headrace-faults-"
#: Throttled tasks wait at most one period: 4 ms keeps that short beside the steps of the scripts (the kernel's
#: default is 100 ms).
CPU_PERIOD_US = 4_000


class Unpermitted(Exception):
    """No cgroup can be made here; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a cgroup limits. None means no limit."""

    cpu_quota_cores: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Directories of one made cgroup: one for v2, one per controller for v1."""

    directories: tuple[Path, ...]

    def enter(self) -> None:
        """Move the calling process in (0 means "the writer")."""
        for directory in self.directories:
            (directory / "cgroup.procs").write_text("0")

    def remove(self) -> None:
        """Kill what is still inside and remove the directories."""
        for directory in self.directories:
            _remove(directory)


@contextlib.contextmanager
def limited(limits: Limits) -> Iterator[Group]:
    """A cgroup with these limits, without any process yet; killed empty and removed on leaving."""
    group = create(limits)
    try:
        yield group
    finally:
        group.remove()


def create(limits: Limits) -> Group:
    """Make the cgroup below (v1) or beside (v2) the caller's own.

    Raises:
        Unpermitted: no controller is mounted or writable here.
    """
    made: list[Path] = []
    try:
        if limits.cpu_quota_cores is not None:
            made.append(_make("cpu"))
            _set_cpu(made[-1], limits.cpu_quota_cores)
        if limits.memory_bytes is not None:
            made.append(_make("memory"))
            _set_memory(made[-1], limits.memory_bytes)
    except OSError as error:
        for directory in made:
            _remove(directory)
        raise Unpermitted(f"no cgroup can be made here: {error}") from error
    return Group(directories=tuple(dict.fromkeys(made)))


def remove_stale() -> list[str]:
    """Remove cgroups of this suite whose maker is dead (a harness that was killed). Returns their names."""
    removed = []
    for controller in ("cpu", "memory"):
        with contextlib.suppress(Unpermitted):
            for directory in _parent(controller).glob(PREFIX + "*"):
                if not Path(f"/proc/{directory.name.removeprefix(PREFIX)}").exists():
                    _remove(directory)
                    removed.append(directory.name)
    return removed


def _make(controller: str) -> Path:
    directory = _parent(controller) / f"{PREFIX}{os.getpid()}"
    directory.mkdir(exist_ok=True)
    return directory


def _set_cpu(directory: Path, cores: float) -> None:
    quota_us = round(cores * CPU_PERIOD_US)
    if (directory / "cpu.max").exists():
        (directory / "cpu.max").write_text(f"{quota_us} {CPU_PERIOD_US}")
    else:
        (directory / "cpu.cfs_period_us").write_text(str(CPU_PERIOD_US))
        (directory / "cpu.cfs_quota_us").write_text(str(quota_us))


def _set_memory(directory: Path, limit_bytes: int) -> None:
    if (directory / "memory.max").exists():
        (directory / "memory.max").write_text(str(limit_bytes))
    else:
        (directory / "memory.limit_in_bytes").write_text(str(limit_bytes))


def _remove(directory: Path) -> None:
    """Kill the members, wait until the kernel let go of them, remove. A group that stays busy raises."""
    deadline_s = time.monotonic() + 10
    while directory.exists():
        for pid in (directory / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                _evict(directory, int(pid))
        try:
            directory.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)  # exiting processes leave the group a moment after they die; nothing notifies of it


def _evict(directory: Path, pid: int) -> None:
    if pid == os.getpid():
        (directory.parent / "cgroup.procs").write_text("0")
    else:
        os.kill(pid, signal.SIGKILL)


def _parent(controller: str) -> Path:
    """The directory in which a child group with this controller can be made."""
    v1, v2 = _mounts()
    memberships = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().split()]
    for _, names, path in memberships:
        if controller in names.split(",") and controller in v1:
            return _below(v1[controller], path)
    for number, _, path in memberships:
        if number == "0" and v2 is not None:
            return _v2_parent(_below(v2, path), v2, controller)
    raise Unpermitted(f"the cgroup controller {controller!r} is not mounted")


def _mounts() -> tuple[dict[str, Path], Path | None]:
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        mount, (kind, _, options) = Path(fields.split()[4]), tail.split(" ", 2)
        if kind == "cgroup":
            v1.update(dict.fromkeys(options.split(","), mount))
        elif kind == "cgroup2":
            v2 = mount
    return v1, v2


def _below(mount: Path, path: str) -> Path:
    """The group's directory; in a container with its own cgroup namespace it may not exist below the mount."""
    directory = mount / path.lstrip("/")
    return directory if directory.exists() else mount


def _v2_parent(own: Path, root: Path, controller: str) -> Path:
    """v2 allows no processes beside child groups, so the new group is made beside the own one (below at the root)."""
    parent = own if own == root else own.parent
    if controller not in (parent / "cgroup.controllers").read_text().split():
        raise Unpermitted(f"the cgroup controller {controller!r} is not given to {parent}")
    if controller not in (parent / "cgroup.subtree_control").read_text().split():
        try:
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError as error:
            raise Unpermitted(f"cannot enable {controller!r} in {parent}: {error}") from error
    return parent
