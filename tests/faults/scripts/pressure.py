"""How many cores other programs took meanwhile: the machine's busy time minus that of the own process group."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Outside:
    """Started with the measurement, asked at its end. Counts the CPUs that this process may use, stolen time too."""

    def __init__(self, group: int | None = None) -> None:
        self.group = os.getpgrp() if group is None else group
        self.cpus = os.sched_getaffinity(0)
        self.start = self._now()

    def cores(self, group_ns: int | None = None) -> float:
        """Cores that others took on average since the start. ``group_ns``: the own group's, once it is gone."""
        time_ns, busy_ns, own_ns = self._now()
        own_ns = own_ns - self.start[2] if group_ns is None else group_ns
        return max(0.0, (busy_ns - self.start[1] - own_ns) / max(1, time_ns - self.start[0]))

    def _now(self) -> tuple[int, int, int]:
        return time.monotonic_ns(), _busy_ns(self.cpus), _group_ns(self.group)


def _busy_ns(cpus: set[int]) -> int:
    """user, nice, system, irq, softirq and steal of these CPUs."""
    total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            total += sum(int(fields[place]) for place in (0, 1, 2, 5, 6, 7))
    return total * TICK_NS


def _group_ns(group: int) -> int:
    """CPU time of the living processes of a process group and of their children that have been waited for."""
    total = 0
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += sum(int(field) for field in fields[11:15])
    return total * TICK_NS
