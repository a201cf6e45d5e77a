"""What the outside samples say of a span of time: cores, run queues, throttling, faults, memory. Pure.

Rates are means over the span; a value that no sample carries is None. "Cores" are CPU-seconds per second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from ..records.rundir import HostSample, Machine, ProcSample


@dataclasses.dataclass
class HostFacts:
    """Means over a span of time. ``*_cores``: CPU-seconds per second; ``*_frac`` 0..1."""

    span_ns: int = 0
    allowed_cores: float | None = None
    machine_cores: int | None = None
    quota_cores: float | None = None
    narrow_cpus: int | None = None
    idle_cores: float | None = None
    machine_idle_cores: float | None = None
    job_cores: float | None = None
    outside_cores: float | None = None
    throttled_frac: float | None = None
    quota_used_frac: float | None = None
    trainer_on_cpu_frac: float | None = None
    trainer_run_queue_frac: float | None = None
    trainer_threads: int | None = None
    worker_on_cpu_cores: float | None = None
    worker_run_queue_cores: float | None = None
    worker_other_on_cpu_cores: float | None = None
    worker_other_run_queue_cores: float | None = None
    worker_system_frac: float | None = None
    worker_threads: int | None = None
    worker_minor_faults_per_s: float | None = None
    major_faults_per_s: float | None = None
    worker_switches_per_s: float | None = None
    read_bytes_per_s: float | None = None
    rchar_bytes_per_s: float | None = None
    psi_cpu_frac: float | None = None
    psi_io_frac: float | None = None
    psi_memory_frac: float | None = None
    private_dirty_growth_bytes_per_s: float | None = None
    private_dirty_bytes: int | None = None
    swap_bytes: int | None = None
    memory_used_frac: float | None = None
    memory_limit_hits_per_s: float | None = None
    num_samples: int = 0

    @property
    def free_cores(self) -> float | None:
        """Cores that this job may use: affinity and quota, less what others take of them."""
        if self.allowed_cores is None:
            return None
        limit = self.allowed_cores if self.quota_cores is None else min(self.allowed_cores, self.quota_cores)
        return max(limit - (self.outside_cores or 0.0), 0.25)


def host_facts(
    samples: list[HostSample], machine: Machine | None, trainer: int, workers: Collection[int], t0: int, t1: int
) -> HostFacts:
    """Reduces the samples within ``t0..t1`` (monotonic ns) to means.

    Args:
        samples: all samples of the run, in time order.
        machine: what the machine has; None when the sampler never wrote it.
        trainer: pid of the process that iterates.
        workers: pids of its workers over the whole run.
        t0, t1: the span.
    """
    facts = HostFacts()
    if machine is not None:
        facts.machine_cores = machine.num_cpus
        facts.allowed_cores = machine.num_allowed_cpus
        facts.quota_cores = machine.cpu_quota_cores
    inside = [sample for sample in samples if t0 <= sample.t_ns <= t1]
    if len(inside) < 2:
        return facts
    facts.num_samples = len(inside)
    facts.span_ns = inside[-1].t_ns - inside[0].t_ns
    _system(facts, inside, machine)
    _trainer(facts, inside, trainer)
    _workers(facts, inside, workers or (trainer,))
    _memory(facts, inside, {trainer, *workers}, machine)
    return facts


def _delta(inside: list[HostSample], get: Callable[[HostSample], int | None]) -> int | None:
    values = [value for sample in inside if (value := get(sample)) is not None]
    return values[-1] - values[0] if len(values) > 1 else None


def _rate(delta: float | None, span_ns: int) -> float | None:
    return None if delta is None or not span_ns else max(delta / span_ns, 0.0)


def _system(facts: HostFacts, inside: list[HostSample], machine: Machine | None) -> None:
    span = facts.span_ns
    facts.idle_cores = _rate(_delta(inside, lambda s: s.cpu_idle_ns), span)
    busy = _rate(_delta(inside, lambda s: s.machine_busy_ns), span)
    if busy is not None and facts.machine_cores:
        facts.machine_idle_cores = max(facts.machine_cores - busy, 0.0)
    facts.psi_cpu_frac = _rate(_delta(inside, lambda s: s.psi_cpu_ns), span)
    facts.psi_io_frac = _rate(_delta(inside, lambda s: s.psi_io_ns), span)
    facts.psi_memory_frac = _rate(_delta(inside, lambda s: s.psi_memory_ns), span)
    facts.throttled_frac = _rate(_delta(inside, lambda s: s.cgroup and s.cgroup.throttled_ns), span)
    used = _rate(_delta(inside, lambda s: s.cgroup and s.cgroup.usage_ns), span)
    if used is not None and facts.quota_cores:
        facts.quota_used_frac = used / facts.quota_cores
    hits = _delta(inside, lambda s: s.cgroup and s.cgroup.memory_limit_hits)
    facts.memory_limit_hits_per_s = None if hits is None else hits / (span / 1e9)
    own = sum(_sum_over(inside, lambda p: p.user_ns + p.system_ns).values())
    facts.job_cores = own / span
    allowed_busy = _rate(_delta(inside, lambda s: s.cpu_busy_ns), span)
    if allowed_busy is not None:
        facts.outside_cores = max(allowed_busy - facts.job_cores, 0.0)


def _sum_over(
    inside: list[HostSample], get: Callable[[ProcSample], int | None], pids: Collection[int] | None = None
) -> dict[int, int]:
    """Growth of a counter per process; a process that came later counts from its first sample."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for sample in inside:
        for proc in sample.procs:
            value = get(proc)
            if value is None or (pids is not None and proc.pid not in pids):
                continue
            first.setdefault(proc.pid, value)
            last[proc.pid] = value
    return {pid: max(last[pid] - first[pid], 0) for pid in first}


def _trainer(facts: HostFacts, inside: list[HostSample], trainer: int) -> None:
    only = (trainer,)
    facts.trainer_on_cpu_frac = _total(inside, lambda p: p.on_cpu_ns, only, facts.span_ns)
    facts.trainer_run_queue_frac = _total(inside, lambda p: p.run_queue_ns, only, facts.span_ns)
    threads = [proc.num_threads for sample in inside for proc in sample.procs if proc.pid == trainer]
    facts.trainer_threads = max(threads) if threads else None


def _total(
    inside: list[HostSample], get: Callable[[ProcSample], int | None], pids: Collection[int], span_ns: int
) -> float | None:
    grown = _sum_over(inside, get, pids)
    return sum(grown.values()) / span_ns if grown else None


def _workers(facts: HostFacts, inside: list[HostSample], pids: Collection[int]) -> None:
    span, total = facts.span_ns, _total
    facts.worker_on_cpu_cores = total(inside, lambda p: p.on_cpu_ns, pids, span)
    facts.worker_run_queue_cores = total(inside, lambda p: p.run_queue_ns, pids, span)
    facts.worker_other_on_cpu_cores = total(inside, lambda p: p.others_on_cpu_ns, pids, span)
    facts.worker_other_run_queue_cores = total(inside, lambda p: p.others_run_queue_ns, pids, span)
    system = total(inside, lambda p: p.system_ns, pids, span)
    user = total(inside, lambda p: p.user_ns, pids, span)
    if system is not None and user is not None and system + user > 0.01:
        facts.worker_system_frac = system / (system + user)
    faults = total(inside, lambda p: p.minor_faults, pids, span)
    facts.worker_minor_faults_per_s = None if faults is None else faults * 1e9
    switches = total(inside, lambda p: p.involuntary_switches, pids, span)
    facts.worker_switches_per_s = None if switches is None else switches * 1e9
    everyone = {proc.pid for sample in inside for proc in sample.procs}
    for name, get in (
        ("major_faults_per_s", lambda p: p.major_faults),
        ("read_bytes_per_s", lambda p: p.read_bytes),
        ("rchar_bytes_per_s", lambda p: p.rchar_bytes),
    ):
        value = total(inside, get, everyone, span)
        setattr(facts, name, None if value is None else value * 1e9)
    threads = [proc.num_threads for sample in inside for proc in sample.procs if proc.pid in pids]
    facts.worker_threads = max(threads) if threads else None
    allowed = [n for sample in inside for proc in sample.procs if proc.pid in pids and (n := proc.num_allowed_cpus)]
    if allowed:
        facts.narrow_cpus = min(allowed)


def _memory(facts: HostFacts, inside: list[HostSample], pids: set[int], machine: Machine | None) -> None:
    series: dict[int, list[tuple[int, int]]] = {}
    swap: dict[int, int] = {}
    for sample in inside:
        for proc in sample.procs:
            if proc.pid not in pids:
                continue
            if proc.private_dirty_bytes is not None:
                series.setdefault(proc.pid, []).append((sample.t_ns, proc.private_dirty_bytes))
            if proc.swap_bytes is not None:
                swap[proc.pid] = proc.swap_bytes
    growth = [(rows[-1][1] - rows[0][1]) / max(rows[-1][0] - rows[0][0], 1) for rows in series.values() if len(rows) > 1]
    if growth:
        facts.private_dirty_growth_bytes_per_s = sum(growth) * 1e9
    if series:
        facts.private_dirty_bytes = sum(rows[-1][1] for rows in series.values())
    facts.swap_bytes = sum(swap.values()) if swap else None
    used = [s.cgroup.memory_bytes for s in inside if s.cgroup and s.cgroup.memory_bytes is not None]
    if used and machine is not None and machine.memory_limit_bytes:
        facts.memory_used_frac = max(used) / machine.memory_limit_bytes
