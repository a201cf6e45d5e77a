"""How a window of ``/proc`` samples splits into on-CPU, run-queue and blocked time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headrace.records.rundir import GpuSample, HostSample, ProcSample

WORKER_NAME = "pt_data_worker"
#: Below this a child python is furniture (resource tracker, forkserver, compile workers that sleep).
_MIN_CHILD_CORES = 0.02
#: NVML's reasons that are limits and not choices: power cap, slowdown, thermal (software and hardware), power brake.
_THROTTLE_BITS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80

#: Word -> kind, the first that fits; the words are those of ``headrace.host.blocked``.
_KINDS = (
    ("unix socket", "pipe"),
    ("socket", "socket"),
    ("pipe", "pipe"),
    ("file", "file"),
    ("io_uring", "file"),
    ("fault", "fault"),
    ("sleep", "sleep"),
    ("lock", "lock"),
    ("device", "device"),
    ("poll", "pipe"),
    ("select", "pipe"),
)


#: A process at a time, ns.
Row = tuple[int, ProcSample]


def kind_of(text: str) -> str:
    """What sort of thing a thread waits for: file, socket, pipe, fault, sleep, lock, device or other."""
    return next((kind for word, kind in _KINDS if word in text), "other")


@dataclass(frozen=True)
class Share:
    """One process over the window. The first three are fractions of the wall time of its main thread and sum to 1."""

    pid: int
    comm: str
    wall_ns: int
    on_cpu_frac: float
    run_queue_frac: float
    blocked_frac: float
    #: All its other threads, in cores.
    others_on_cpu_cores: float
    others_run_queue_cores: float
    num_threads: int
    #: Share of the samples in which the kernel called it uninterruptible (state D): a disk or a network file system.
    disk_frac: float
    major_faults_per_s: float
    read_bytes_per_s: float | None
    rchar_bytes_per_s: float | None
    dirty_growth_bytes_per_s: float | None
    num_allowed_cpus: int | None
    #: Kind of thing waited for -> fraction of the wall time, where it was looked at.
    waits: Mapping[str, float] = field(default_factory=dict)
    #: The same by the words themselves.
    words: Mapping[str, float] = field(default_factory=dict)

    @property
    def busy_frac(self) -> float:
        """On a core or ready for one."""
        return self.on_cpu_frac + self.run_queue_frac

    def waiting(self, *kinds: str) -> float:
        """The fraction spent on some kinds of waits; 0 when none was seen."""
        return sum(self.waits.get(kind, 0.0) for kind in kinds)


@dataclass(frozen=True)
class Host:
    """The machine over the window; None where it was not measured."""

    wall_ns: int
    idle_cores: float | None
    #: Of the allowed CPUs, by whatever program.
    busy_cores: float | None
    machine_busy_cores: float | None
    throttled_cores: float | None
    psi_cpu_frac: float | None
    psi_io_frac: float | None
    psi_memory_frac: float | None
    memory_limit_hits: int | None
    swap_growth_bytes: int | None
    gpu_util_frac: float | None
    gpu_throttled_frac: float | None
    #: "gen 1 x4 of gen 4 x16" while the GPU was busy, when below what it can do.
    slow_link: str | None


def share(samples: Sequence[HostSample], pid: int, looks: Sequence[str | None] = ()) -> Share | None:
    """One process over the window.

    Args:
        samples: In the order of time.
        pid: The process.
        looks: What its main thread was blocked on at random moments; None for a moment in which it ran.

    Returns:
        None when it was seen less than twice, or its threads could not be read.
    """
    return share_of(by_pid(samples).get(pid, []), looks)


def by_pid(samples: Sequence[HostSample]) -> dict[int, list[Row]]:
    """The rows of every process whose threads could be read, in the order of time."""
    found: dict[int, list[Row]] = {}
    for sample in samples:
        for proc in sample.procs:
            if proc.on_cpu_ns is not None:
                found.setdefault(proc.pid, []).append((sample.t_ns, proc))
    return found


def share_of(rows: Sequence[Row], looks: Sequence[str | None] = ()) -> Share | None:
    """As `share`, from the rows of one process."""
    if len(rows) < 2 or rows[-1][0] <= rows[0][0]:
        return None
    procs = [proc for _, proc in rows]
    wall = rows[-1][0] - rows[0][0]
    on_cpu = min((_grown(procs, lambda p: p.on_cpu_ns) or 0) / wall, 1.0)
    run_queue = min((_grown(procs, lambda p: p.run_queue_ns) or 0) / wall, 1.0 - on_cpu)
    blocked = 1.0 - on_cpu - run_queue
    words = _words(looks, blocked)
    waits: dict[str, float] = {}
    for text, frac in words.items():
        waits[kind_of(text)] = waits.get(kind_of(text), 0.0) + frac
    per_s = wall / 1e9
    return Share(
        pid=procs[-1].pid,
        comm=procs[-1].comm,
        wall_ns=wall,
        on_cpu_frac=on_cpu,
        run_queue_frac=run_queue,
        blocked_frac=blocked,
        others_on_cpu_cores=(_grown(procs, lambda p: p.others_on_cpu_ns) or 0) / wall,
        others_run_queue_cores=(_grown(procs, lambda p: p.others_run_queue_ns) or 0) / wall,
        num_threads=max(p.num_threads for p in procs),
        disk_frac=sum(p.state == "D" for p in procs) / len(procs),
        major_faults_per_s=(_grown(procs, lambda p: p.major_faults) or 0) / per_s,
        read_bytes_per_s=_rate(_grown(procs, lambda p: p.read_bytes), per_s),
        rchar_bytes_per_s=_rate(_grown(procs, lambda p: p.rchar_bytes), per_s),
        dirty_growth_bytes_per_s=_rate(_difference(p.private_dirty_bytes for p in procs), per_s),
        num_allowed_cpus=next((p.num_allowed_cpus for p in reversed(procs) if p.num_allowed_cpus), None),
        waits=waits,
        words=words,
    )


def _words(looks: Sequence[str | None], blocked_frac: float) -> dict[str, float]:
    """Spread the blocked time, which was measured, over what it was seen blocked on, which was sampled."""
    seen = Counter(text for text in looks if text is not None)
    return {text: blocked_frac * count / seen.total() for text, count in seen.most_common()}


def _grown(procs: Sequence[ProcSample], value: Callable[[ProcSample], int | None]) -> int | None:
    """What a total grew by. Steps back are left out: a thread that ends takes its share along, a pid may be reused."""
    return _growth(value(proc) for proc in procs)


def _growth(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(max(b - a, 0) for a, b in pairwise(known)) if len(known) > 1 else None


def _difference(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return known[-1] - known[0] if len(known) > 1 else None


def _rate(total: int | None, seconds: float) -> float | None:
    return None if total is None else total / seconds


def host(samples: Sequence[HostSample]) -> Host | None:
    """The machine over the window; None with less than two samples."""
    if len(samples) < 2 or samples[-1].t_ns <= samples[0].t_ns:
        return None
    wall = samples[-1].t_ns - samples[0].t_ns
    groups = [s.cgroup for s in samples if s.cgroup is not None]
    # A GPU that did nothing in the whole window is another job's or nobody's.
    used = {g.index for s in samples for g in s.gpus if g.util_frac}
    utils = [g.util_frac for s in samples for g in s.gpus if g.util_frac is not None and g.index in used]
    return Host(
        wall_ns=wall,
        idle_cores=_rate(_growth(s.cpu_idle_ns for s in samples), wall),
        busy_cores=_rate(_growth(s.cpu_busy_ns for s in samples), wall),
        machine_busy_cores=_rate(_growth(s.machine_busy_ns for s in samples), wall),
        throttled_cores=_rate(_growth(g.throttled_ns for g in groups), wall),
        psi_cpu_frac=_rate(_growth(s.psi_cpu_ns for s in samples), wall),
        psi_io_frac=_rate(_growth(s.psi_io_ns for s in samples), wall),
        psi_memory_frac=_rate(_growth(s.psi_memory_ns for s in samples), wall),
        memory_limit_hits=_growth(g.memory_limit_hits for g in groups),
        swap_growth_bytes=_swap_growth(samples),
        gpu_util_frac=sum(utils) / len(utils) if utils else None,
        gpu_throttled_frac=_gpu_throttled(samples, wall),
        slow_link=_slow_link(samples),
    )


def _swap_growth(samples: Sequence[HostSample]) -> int | None:
    totals = []
    for sample in samples:
        swaps = [p.swap_bytes for p in sample.procs if p.swap_bytes is not None]
        totals.append(sum(swaps) if swaps else None)
    return _difference(totals)


def _gpu_throttled(samples: Sequence[HostSample], wall_ns: int) -> float | None:
    """The largest share of time that any GPU was held back by power or heat."""
    by_gpu: dict[int, list[GpuSample]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            by_gpu.setdefault(gpu.index, []).append(gpu)
    fracs = [f for gpus in by_gpu.values() if (f := _one_gpu_throttled(gpus, wall_ns)) is not None]
    return max(fracs, default=None)


def _one_gpu_throttled(gpus: Sequence[GpuSample], wall_ns: int) -> float | None:
    power, thermal = _growth(g.throttled_power_ns for g in gpus), _growth(g.throttled_thermal_ns for g in gpus)
    if power is not None or thermal is not None:
        return min(((power or 0) + (thermal or 0)) / wall_ns, 1.0)
    reasons = [g.throttle_reasons for g in gpus if g.throttle_reasons is not None]
    return sum(bool(r & _THROTTLE_BITS) for r in reasons) / len(reasons) if reasons else None


def _slow_link(samples: Sequence[HostSample]) -> str | None:
    """The best link seen while a GPU was busy, when below the GPU's own: an idle link drops to gen 1 to save power."""
    best: dict[int, GpuSample] = {}
    for gpu in (g for s in samples for g in s.gpus):
        if (gpu.util_frac or 0) < 0.5 or gpu.pcie_gen is None or gpu.pcie_width is None:
            continue
        seen = best.get(gpu.index)
        if seen is None or _speed(gpu.pcie_gen, gpu.pcie_width) > _speed(seen.pcie_gen, seen.pcie_width):
            best[gpu.index] = gpu
    for gpu in best.values():
        if _speed(gpu.pcie_gen, gpu.pcie_width) < _speed(gpu.pcie_gen_max, gpu.pcie_width_max):
            return f"gen {gpu.pcie_gen} x{gpu.pcie_width} of gen {gpu.pcie_gen_max} x{gpu.pcie_width_max}"
    return None


def _speed(gen: int | None, width: int | None) -> float:
    """Relative speed: each generation doubles it."""
    return 0.0 if gen is None or width is None else 2.0**gen * width


def parents(samples: Sequence[HostSample]) -> dict[int, int]:
    """For each pid its parent at first sight, so that an orphan keeps the parent that it had."""
    found: dict[int, int] = {}
    for sample in samples:
        for proc in sample.procs:
            found.setdefault(proc.pid, proc.ppid)
    return found


def below(parent_of: Mapping[int, int], root: int) -> set[int]:
    """All pids below ``root``, without it."""
    members = {root}
    grown = True
    while grown:
        new = {pid for pid, parent in parent_of.items() if parent in members} - members
        grown = bool(new)
        members |= new
    return members - {root}


def is_worker(comm: str) -> bool:
    """Whether torch named this process a DataLoader worker."""
    return comm.startswith(WORKER_NAME)


def is_python(comm: str) -> bool:
    """Whether a process's name is that of a Python interpreter."""
    return comm.startswith(("python", "pypy"))


def cores(part: Share) -> float:
    """All threads of a process, in cores."""
    return part.on_cpu_frac + part.others_on_cpu_cores


def is_idle_child(part: Share) -> bool:
    """Whether a child Python did nothing that a worker would do."""
    waiting = part.waiting("file", "socket", "sleep", "fault")
    return cores(part) + part.run_queue_frac + waiting + part.disk_frac < _MIN_CHILD_CORES
