"""What the outside samples say of a span of time: cores, run queues, throttling, faults, memory. Pure.

Rates are means over the span; a value that no sample carries is None. "Cores" are CPU-seconds per second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from ..records.rundir import HostSample, Machine, ProcSample

#: The samples of each process, in time order.


#: The unit in which a fault copies; larger base pages (64 KiB on some aarch64) make the share smaller, never larger.
PAGE_BYTES = 4096


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
    #: Private dirty pages per minor fault: near 1 when each fault copied a shared page, near 0 for memory then freed.
    fault_kept_frac: float | None = None
    swap_bytes: int | None = None
    memory_used_frac: float | None = None
    memory_limit_hits_per_s: float | None = None
    gpu_util_frac: float | None = None
    gpu_throttled_frac: float | None = None
    #: Link speed under load as a share of what device and slot have.
    gpu_link_frac: float | None = None
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
        t0: where the span begins, monotonic ns.
        t1: where it ends.
    """
    facts = HostFacts()
    if machine is not None:
        facts.machine_cores = machine.num_cpus
        facts.allowed_cores = machine.num_allowed_cpus
        facts.quota_cores = machine.cpu_quota_cores
    inside = [sample for sample in samples if t0 <= sample.t_ns <= t1]
    if len(inside) < 2 or inside[-1].t_ns <= inside[0].t_ns:
        return facts
    facts.num_samples = len(inside)
    facts.span_ns = inside[-1].t_ns - inside[0].t_ns
    rows = _by_pid(inside)
    _system(facts, inside, rows)
    _trainer(facts, rows, trainer)
    _workers(facts, rows, workers or (trainer,))
    _memory(facts, inside, set(workers) or {trainer}, machine)
    _gpu(facts, inside)
    return facts


def _delta(inside: list[HostSample], get: Callable[[HostSample], int | None]) -> int | None:
    values = [value for sample in inside if (value := get(sample)) is not None]
    return values[-1] - values[0] if len(values) > 1 else None


def _rate(delta: float | None, span_ns: int) -> float | None:
    return None if delta is None or not span_ns else max(delta / span_ns, 0.0)


def _system(facts: HostFacts, inside: list[HostSample], rows: _Rows) -> None:
    span = facts.span_ns
    facts.idle_cores = _rate(_delta(inside, lambda s: s.cpu_idle_ns), span)
    busy = _rate(_delta(inside, lambda s: s.machine_busy_ns), span)
    if busy is not None and facts.machine_cores:
        facts.machine_idle_cores = max(facts.machine_cores - busy, 0.0)
    facts.psi_cpu_frac = _rate(_delta(inside, lambda s: s.psi_cpu_ns), span)
    facts.psi_io_frac = _rate(_delta(inside, lambda s: s.psi_io_ns), span)
    facts.psi_memory_frac = _rate(_delta(inside, lambda s: s.psi_memory_ns), span)
    facts.throttled_frac = _rate(_delta(inside, lambda s: s.cgroup.throttled_ns if s.cgroup else None), span)
    used = _rate(_delta(inside, lambda s: s.cgroup.usage_ns if s.cgroup else None), span)
    if used is not None and facts.quota_cores:
        facts.quota_used_frac = used / facts.quota_cores
    hits = _delta(inside, lambda s: s.cgroup.memory_limit_hits if s.cgroup else None)
    facts.memory_limit_hits_per_s = None if hits is None else hits / (span / 1e9)
    own = sum(_sum_over(rows, lambda p: p.user_ns + p.system_ns).values())
    facts.job_cores = own / span
    allowed_busy = _rate(_delta(inside, lambda s: s.cpu_busy_ns), span)
    if allowed_busy is not None:
        facts.outside_cores = max(allowed_busy - facts.job_cores, 0.0)


class _Rows(dict[int, list[ProcSample]]):
    """Samples by process. ``born``: processes that the span's first sample does not hold yet."""

    born: set[int]


def _by_pid(inside: list[HostSample]) -> _Rows:
    rows = _Rows()
    for sample in inside:
        for proc in sample.procs:
            rows.setdefault(proc.pid, []).append(proc)
    rows.born = set(rows) - {proc.pid for proc in inside[0].procs}
    return rows


def _sum_over(
    rows: _Rows, get: Callable[[ProcSample], int | None], pids: Collection[int] | None = None
) -> dict[int, int]:
    """Growth of a counter per process; one that was born within the span counts from its birth."""
    grown: dict[int, int] = {}
    for pid, procs in rows.items():
        if pids is not None and pid not in pids:
            continue
        first = next((value for proc in procs if (value := get(proc)) is not None), None)
        last = next((value for proc in reversed(procs) if (value := get(proc)) is not None), None)
        if first is not None and last is not None:
            grown[pid] = max(last - (0 if pid in rows.born else first), 0)
    return grown


def _trainer(facts: HostFacts, rows: _Rows, trainer: int) -> None:
    only = (trainer,)
    facts.trainer_on_cpu_frac = _total(rows, lambda p: p.on_cpu_ns, only, facts.span_ns)
    facts.trainer_run_queue_frac = _total(rows, lambda p: p.run_queue_ns, only, facts.span_ns)
    threads = [proc.num_threads for proc in rows.get(trainer, ())]
    facts.trainer_threads = max(threads) if threads else None


def _total(rows: _Rows, get: Callable[[ProcSample], int | None], pids: Collection[int], span_ns: int) -> float | None:
    grown = _sum_over(rows, get, pids)
    return sum(grown.values()) / span_ns if grown else None


def _workers(facts: HostFacts, rows: _Rows, pids: Collection[int]) -> None:
    span, total = facts.span_ns, _total
    facts.worker_on_cpu_cores = total(rows, lambda p: p.on_cpu_ns, pids, span)
    facts.worker_run_queue_cores = total(rows, lambda p: p.run_queue_ns, pids, span)
    facts.worker_other_on_cpu_cores = total(rows, lambda p: p.others_on_cpu_ns, pids, span)
    facts.worker_other_run_queue_cores = total(rows, lambda p: p.others_run_queue_ns, pids, span)
    system = total(rows, lambda p: p.system_ns, pids, span)
    user = total(rows, lambda p: p.user_ns, pids, span)
    if system is not None and user is not None and system + user > 0.01:
        facts.worker_system_frac = system / (system + user)
    faults = total(rows, lambda p: p.minor_faults, pids, span)
    facts.worker_minor_faults_per_s = None if faults is None else faults * 1e9
    switches = total(rows, lambda p: p.involuntary_switches, pids, span)
    facts.worker_switches_per_s = None if switches is None else switches * 1e9
    for name, get in (
        ("major_faults_per_s", lambda p: p.major_faults),
        ("read_bytes_per_s", lambda p: p.read_bytes),
        ("rchar_bytes_per_s", lambda p: p.rchar_bytes),
    ):
        value = total(rows, get, rows, span)
        setattr(facts, name, None if value is None else value * 1e9)
    threads = [proc.num_threads for pid in pids for proc in rows.get(pid, ())]
    facts.worker_threads = max(threads) if threads else None
    allowed = [n for pid in pids for proc in rows.get(pid, ()) if (n := proc.num_allowed_cpus)]
    if allowed:
        facts.narrow_cpus = min(allowed)


def _memory(facts: HostFacts, inside: list[HostSample], pids: set[int], machine: Machine | None) -> None:
    series: dict[int, list[tuple[int, int]]] = {}
    swap: dict[int, int] = {}
    kept: dict[int, tuple[int, int]] = {}
    for sample in inside:
        for proc in sample.procs:
            if proc.pid not in pids:
                continue
            if proc.private_dirty_bytes is not None:
                series.setdefault(proc.pid, []).append((sample.t_ns, proc.private_dirty_bytes))
                kept[proc.pid] = (proc.private_dirty_bytes, proc.minor_faults * PAGE_BYTES)
            if proc.swap_bytes is not None:
                swap[proc.pid] = proc.swap_bytes
    growth = [
        (rows[-1][1] - rows[0][1]) / max(rows[-1][0] - rows[0][0], 1) for rows in series.values() if len(rows) > 1
    ]
    if growth:
        facts.private_dirty_growth_bytes_per_s = sum(growth) * 1e9
    if series:
        facts.private_dirty_bytes = sum(rows[-1][1] for rows in series.values())
    if not kept:  # workers too short-lived for a look at their page tables: what is resident bounds what was kept
        kept = {p.pid: (p.rss_bytes, p.minor_faults * PAGE_BYTES) for s in inside for p in s.procs if p.pid in pids}
    copied = sum(faulted for _, faulted in kept.values())
    facts.fault_kept_frac = sum(private for private, _ in kept.values()) / copied if copied else None
    facts.swap_bytes = sum(swap.values()) if swap else None
    used = [s.cgroup.memory_bytes for s in inside if s.cgroup and s.cgroup.memory_bytes is not None]
    if used and machine is not None and machine.memory_limit_bytes:
        facts.memory_used_frac = max(used) / machine.memory_limit_bytes


def _gpu(facts: HostFacts, inside: list[HostSample]) -> None:
    """Means over the GPUs that worked; not measured yet on a real one."""
    looks = [gpu for sample in inside for gpu in sample.gpus]
    utils = [gpu.util_frac for gpu in looks if gpu.util_frac is not None]
    facts.gpu_util_frac = sum(utils) / len(utils) if utils else None
    links = [
        gpu.pcie_gen * gpu.pcie_width / (gpu.pcie_gen_max * gpu.pcie_width_max)
        for gpu in looks
        if gpu.pcie_gen and gpu.pcie_width and gpu.pcie_gen_max and gpu.pcie_width_max and (gpu.util_frac or 0.0) > 0.2
    ]
    # An idle link sleeps in generation 1: only the best look counts.
    facts.gpu_link_frac = max(links) if links else None
    slowed: dict[int, list[int]] = {}
    for gpu in looks:
        total = (gpu.throttled_power_ns or 0) + (gpu.throttled_thermal_ns or 0)
        if gpu.throttled_power_ns is not None or gpu.throttled_thermal_ns is not None:
            slowed.setdefault(gpu.index, []).append(total)
    if slowed and facts.span_ns:
        facts.gpu_throttled_frac = max(max(v[-1] - v[0], 0) for v in slowed.values()) / facts.span_ns
