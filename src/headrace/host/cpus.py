"""Cores: which ones a process may use, how busy they were, and how many threads share one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from headrace.host.procfs import Reader, parse_cpu_list, read_text

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Totals of one CPU since boot. Time stolen by the hypervisor counts as busy: it could not be used."""

    busy_ns: int
    idle_ns: int


def parse_cpu_times(text: str) -> dict[int, CpuTimes]:
    """Parse ``/proc/stat``: user nice system idle iowait irq softirq steal (guest time is part of user)."""
    times = {}
    for line in text.splitlines():
        if not line.startswith("cpu"):
            break
        name, *fields = line.split()
        if name == "cpu":
            continue
        ticks = [int(field) for field in fields[:8]]
        idle = sum(ticks[3:5])
        times[int(name[3:])] = CpuTimes((sum(ticks) - idle) * _TICK_NS, idle * _TICK_NS)
    return times


def read_cpu_times(read: Reader = read_text) -> dict[int, CpuTimes]:
    """Busy and idle time of every CPU that is online; empty when ``/proc/stat`` may not be read."""
    return parse_cpu_times(read("/proc/stat") or "")


def total(times: dict[int, CpuTimes], cpus: set[int]) -> CpuTimes | None:
    """The sum over some CPUs; None when none of them is known."""
    chosen = [times[cpu] for cpu in cpus if cpu in times]
    return CpuTimes(sum(t.busy_ns for t in chosen), sum(t.idle_ns for t in chosen)) if chosen else None


def read_affinity(pid: int) -> set[int] | None:
    """The CPUs that the main thread of a process may use; None when it is gone."""
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return None


def read_threads_per_core(cpu: int) -> int | None:
    """How many hardware threads share the core of this CPU; None when the kernel does not say."""
    text = read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return len(parse_cpu_list(text)) if text else None
