"""What ``/proc`` and NVML alone can tell about a training job, as a finding of the closed list. Pure.

Used for ``headrace attach`` and for a Python process that never reported. From outside there are no steps and no
batches, so the confidence is "medium" at best, and ``unknown`` names the two causes that could not be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core import procshare
from headrace.core.procevidence import (
    Job,
    data_wait_frac,
    evidence,
    fetch_wait_frac,
    foreign_cores,
    main_wait,
    num_allowed_cpus,
)
from headrace.core.procshare import Share
from headrace.core.units import percent
from headrace.records.run import CauseName, Change, Confidence, Finding, Loader, RunnerUp
from headrace.records.rundir import HostSample, Machine

Looks = Mapping[int, Sequence[str | None]]

#: Below this share of the time a cause is not worth naming.
_MIN_SHARE = 0.10
#: A GPU that runs this much is the limit; gaps shorter than NVML's window of 1/6 s can still hide in it.
_GPU_FULL = 0.90
_SEPARATE = "headrace run COMMAND..."


@dataclass(frozen=True)
class Verdict:
    """A cause with its share of the time, before it is dressed as a finding."""

    cause: CauseName
    share_frac: float
    confidence: Confidence
    summary: str
    between: tuple[CauseName, CauseName] | None = None
    runner_up: RunnerUp | None = None
    changes: list[Change] = field(default_factory=list)


def view(samples: Sequence[HostSample], machine: Machine, root_pid: int, blocked: Looks | None = None) -> Loader:
    """One trainer and its workers, as a loader of kind ``proc`` with a finding.

    Args:
        samples: In the order of time, at least two.
        machine: The first line of ``host.jsonl``.
        root_pid: The trainer (see `trainers`).
        blocked: For some pids what the main thread was blocked on at random moments; None: it ran at that moment.

    Returns:
        A loader without steps; its finding is ``unknown`` when the process was not seen long enough.
    """
    job = _job(samples, machine, root_pid, blocked or {})
    loader = Loader(site=f"process {root_pid}", role="unknown", kind="proc")
    if job is None:
        loader.finding = _unseen(root_pid)
        return loader
    loader.num_workers = len(job.workers) or None
    loader.finding = _finding(job)
    return loader


def trainers(samples: Sequence[HostSample], root_pid: int) -> list[int]:
    """The processes that train: parents of DataLoader workers; else the Python that uses the most CPU.

    Args:
        samples: In the order of time.
        root_pid: Where the program begins: a launcher, a shell, or the trainer itself.

    Returns:
        At least one pid, in rising order (ranks start in order).
    """
    parent_of = procshare.parents(samples)
    names = {proc.pid: proc.comm for sample in samples for proc in sample.procs}
    inside = procshare.below(parent_of, root_pid) | {root_pid}
    owners = {parent_of[pid] for pid, comm in names.items() if procshare.is_worker(comm)}
    threads = {proc.pid: proc.num_threads for sample in samples for proc in sample.procs}
    servers = {pid for pid, comm in names.items() if procshare.is_worker(comm) or threads[pid] == 1}
    owners = {_skip_servers(pid, servers, parent_of) for pid in owners} & inside
    if owners:
        return sorted(owners)
    pythons = [pid for pid in inside if procshare.is_python(names.get(pid, ""))]
    rows = procshare.by_pid(samples)
    used = {p: procshare.cores(part) for p in pythons if (part := procshare.share_of(rows.get(p, []))) is not None}
    return [max(used, key=lambda pid: used[pid])] if used else [root_pid]


def _skip_servers(pid: int, servers: set[int], parent_of: Mapping[int, int]) -> int:
    """Up from a forkserver to who asked it: it has one thread, a trainer has one per queue that it feeds."""
    while pid in servers and parent_of.get(pid) in parent_of:
        pid = parent_of[pid]
    return pid


def _job(samples: Sequence[HostSample], machine: Machine, pid: int, looks: Looks) -> Job | None:
    rows, host = procshare.by_pid(samples), procshare.host(samples)
    trainer = procshare.share_of(rows.get(pid, []), looks.get(pid, ()))
    if trainer is None or host is None:
        return None
    parent_of = procshare.parents(samples)
    names = {proc.pid: proc.comm for sample in samples for proc in sample.procs}
    children = sorted(procshare.below(parent_of, pid))
    chosen = [c for c in children if procshare.is_worker(names[c])]
    guessed = not chosen
    if guessed:
        chosen = [c for c in children if procshare.is_python(names[c])]
    parts = [part for c in chosen if (part := procshare.share_of(rows.get(c, []), looks.get(c, ()))) is not None]
    workers = [part for part in parts if not (guessed and procshare.is_idle_child(part))]
    return Job(trainer, workers, host, machine, looked=bool(looks))


def _finding(job: Job) -> Finding:
    verdict = _verdict(job)
    return Finding(
        cause=verdict.cause,
        stall_frac=None,
        confidence=verdict.confidence,
        summary=verdict.summary,
        share_frac=verdict.share_frac,
        evidence=evidence(job),
        runner_up=verdict.runner_up,
        changes=verdict.changes,
        between=verdict.between,
        separate_with=_SEPARATE if verdict.confidence == "low" else None,
    )


def _verdict(job: Job) -> Verdict:
    """The order matters: what is measured directly comes before what is concluded."""
    return _by_device(job) or _by_memory(job) or (_by_workers(job) if job.workers else _by_trainer(job))


def _by_device(job: Job) -> Verdict | None:
    """The GPU's own counters: it is busy, or held back."""
    util, throttled = job.host.gpu_util_frac, job.host.gpu_throttled_frac
    if util is None or util < _GPU_FULL:
        return None
    if throttled is not None and throttled >= 0.2:
        what = f"The GPU was held back by power or heat for {percent(throttled)} of the time."
        return Verdict(
            "throttle", throttled, "medium", what, changes=[Change(what="raise the power cap or cool the GPU")]
        )
    what = f"The GPU is busy {percent(util)} of the time: there is little to gain from data."
    return Verdict("compute", util, "medium", what)


def _by_memory(job: Job) -> Verdict | None:
    """Swapping, or a memory limit that is being hit while the processes wait for pages."""
    faults = sum(part.major_faults_per_s for part in [job.trainer, *job.workers])
    pressure, swapped = job.host.psi_memory_frac or 0.0, (job.host.swap_growth_bytes or 0) > 0
    limited = (job.host.memory_limit_hits or 0) > 0
    if not (swapped or limited) or pressure < _MIN_SHARE or faults < 10:
        return None
    how = "memory is being swapped out" if swapped else "the memory limit is being hit"
    what = f"The job waits for memory {percent(pressure)} of the time: {how}."
    change = Change(what="fewer workers, a smaller prefetch factor, or a higher memory limit")
    return Verdict("memory", pressure, "medium", what, changes=[change])


# ------------------------------------------------------------------------------------------------ with workers


def _by_workers(job: Job) -> Verdict:
    wait = data_wait_frac(job)
    if wait is None:
        return _unclear_workers(job)
    if wait < _MIN_SHARE:
        return _not_the_data(job)
    on_cpu = job.mean([w.on_cpu_frac for w in job.workers])
    run_queue = job.mean([w.run_queue_frac for w in job.workers])
    fetch_wait = job.mean([fetch_wait_frac(w) for w in job.workers])
    total = on_cpu + run_queue + fetch_wait
    if total < 0.3:
        return _idle_workers(wait)
    ranked = sorted(
        ((fetch_wait, _storage(job)), (on_cpu, _on_core(job)), (run_queue, _in_queue(job))), key=lambda p: -p[0]
    )
    (first, verdict), (second, other) = ranked[0], ranked[1]
    confident: Confidence = (
        "medium" if job.looked and first > 1.5 * second and verdict.confidence == "medium" else "low"
    )
    runner_up = verdict.runner_up or RunnerUp(cause=other.cause, share_frac=wait * second / total)
    if runner_up.cause == verdict.cause:
        runner_up = RunnerUp(cause=ranked[2][1].cause, share_frac=wait * ranked[2][0] / total)
    return Verdict(
        verdict.cause,
        wait * first / total,
        confident,
        f"The trainer waits for its workers {percent(wait)} of the time. {verdict.summary}",
        runner_up=runner_up,
        changes=verdict.changes,
    )


def _storage(job: Job) -> Verdict:
    wait = job.mean([fetch_wait_frac(w) for w in job.workers])
    where = main_wait(job.workers)
    what = f"They are blocked {percent(wait)} of the time" + (f", most in: {where}." if where else ".")
    change = Change(what="bring the data nearer (local disk, fewer and larger files), or read more of it at once")
    return Verdict("storage", wait, "medium", what, changes=[change])


def _on_core(job: Job) -> Verdict:
    share = job.mean([w.on_cpu_frac for w in job.workers])
    idle = job.host.idle_cores
    what = f"They are on a core {percent(share)} of the time"
    if idle is not None and idle >= 1.0:
        change = Change(what="more workers", from_=len(job.workers), to=len(job.workers) + int(idle))
        return Verdict("workers", share, "medium", f"{what} while {idle:.1f} allowed cores idle.", changes=[change])
    change = Change(what="make decoding and transforms cheaper, or give the job more cores")
    sure: Confidence = "low" if idle is None else "medium"
    return Verdict("preprocess", share, sure, f"{what}, and no allowed core is left idle.", changes=[change])


def _in_queue(job: Job) -> Verdict:
    """Ready without a core: `oversubscribed` by a quota, a mask or too many threads, else the cores are used up."""
    share = job.mean([w.run_queue_frac for w in job.workers])
    what = f"They are ready but without a core {percent(share)} of the time"
    for reason, cure in _crowding(job, [job.trainer, *job.workers]):
        return Verdict("oversubscribed", share, "medium", f"{what}: {reason}.", changes=[Change(what=cure)])
    other = RunnerUp(cause="oversubscribed", share_frac=share)
    change = Change(what="make decoding and transforms cheaper, or give the job more cores")
    foreign = foreign_cores(job) or 0.0
    why = f"other programs use {foreign:.1f} of the allowed cores" if foreign >= 0.3 else "all cores are used"
    return Verdict("preprocess", share, "low", f"{what}: {why}.", runner_up=other, changes=[change])


def _crowding(job: Job, parts: Sequence[Share]) -> list[tuple[str, str]]:
    """Why threads lack a core although fewer threads, or lifting a limit, would help: (reason, change)."""
    reasons = []
    run_queue = sum(p.run_queue_frac + p.others_run_queue_cores for p in parts)
    throttled = job.host.throttled_cores or 0.0
    if throttled >= 0.05 and throttled >= 0.3 * run_queue:
        quota = job.machine.cpu_quota_cores
        limit = f"a CPU quota of {quota:g} cores" if quota is not None else "a CPU quota"
        reasons.append((f"{limit} stops the job for {throttled:.1f} core-seconds per second", "lift the CPU quota"))
    unused = _cores_outside(job)
    if unused is not None and unused >= 1.0:
        reasons.append(
            (
                f"the affinity allows {num_allowed_cpus(job)} of {job.machine.num_cpus} CPUs and others idle",
                "widen the affinity",
            )
        )
    workers = job.workers or [job.trainer]
    others = sum(w.others_run_queue_cores for w in workers)
    if others > sum(w.run_queue_frac for w in workers) and others >= 0.5:
        threads = max(w.num_threads for w in workers)
        reasons.append((f"each worker runs up to {threads} threads", "one thread per worker (OMP_NUM_THREADS=1)"))
    return reasons


def _cores_outside(job: Job) -> float | None:
    """Idle cores of the machine that the job's affinity keeps it from; None without a narrow affinity."""
    allowed, everything, busy = num_allowed_cpus(job), job.machine.num_cpus, job.host.machine_busy_cores
    if allowed is None or everything is None or busy is None or allowed >= everything:
        return None
    return everything - busy - (job.host.idle_cores or 0.0)


def _not_the_data(job: Job) -> Verdict:
    """The workers are ahead: the limit is the device or the trainer, which NVML tells apart when there is a GPU."""
    util, main = job.host.gpu_util_frac, job.trainer
    ahead = "The workers are ahead of the trainer: data is not the limit."
    if util is None and procshare.cores(main) >= 0.7:
        return Verdict(
            "compute", main.busy_frac, "medium", f"{ahead} It computes on {procshare.cores(main):.1f} cores."
        )
    if util is not None:
        what = f"{ahead} Yet the GPU is busy only {percent(util)} of the time."
        return Verdict("unknown", 1.0 - util, "low", what, between=("launch", "sync"))
    return Verdict("compute", main.blocked_frac, "low", f"{ahead} What it waits for can not be seen from outside.")


def _unclear_workers(job: Job) -> Verdict:
    what = "Whether the trainer waits for its workers can not be told from the kernel's counters alone."
    share = max(job.trainer.blocked_frac, 1.0 - (job.host.gpu_util_frac or 0.0))
    return Verdict("unknown", share, "low", what, between=("storage", "compute"))


def _idle_workers(wait: float) -> Verdict:
    what = f"The trainer waits for its workers {percent(wait)} of the time, yet most of them have nothing to do."
    return Verdict("unknown", wait, "low", what, between=("straggler", "transport"))


# --------------------------------------------------------------------------------------------- without workers


def _by_trainer(job: Job) -> Verdict:
    """One process does everything: only waits that can not be compute's are separable."""
    main = job.trainer
    fetch_wait = main.waiting("file", "socket", "fault") if main.waits else min(main.disk_frac, main.blocked_frac)
    if fetch_wait >= _MIN_SHARE and fetch_wait >= main.on_cpu_frac and fetch_wait >= main.run_queue_frac:
        where = main_wait([main])
        what = f"The trainer itself is blocked {percent(fetch_wait)} of the time" + (f" in: {where}." if where else ".")
        change = Change(what="load in worker processes: DataLoader(num_workers=...)")
        sure: Confidence = "medium" if main.waits else "low"
        return Verdict("storage", fetch_wait, sure, what, changes=[change], runner_up=_runner_up(job))
    crowding = _crowding(job, [main])
    queued = main.run_queue_frac + main.others_run_queue_cores
    if crowding and queued >= _MIN_SHARE:
        what = f"The trainer is ready but without a core: {crowding[0][0]}."
        return Verdict("oversubscribed", min(queued, 1.0), "medium", what, changes=[Change(what=crowding[0][1])])
    if main.busy_frac >= 0.5:
        return _busy_alone(job)
    what = f"The trainer is blocked {percent(main.blocked_frac)} of the time"
    if main.waiting("sleep", "lock") >= _MIN_SHARE:
        # A pause or a lock can be the dataset's, or how the program waits for its device.
        tail = f", most in: {main_wait([main])}."
        return Verdict("unknown", main.blocked_frac, "low", what + tail, between=("storage", "compute"))
    tail = ", on nothing that names the data."
    return Verdict("unknown", main.blocked_frac, "low", what + tail, between=("compute", "outside"))


def _runner_up(job: Job) -> RunnerUp:
    return RunnerUp(cause="compute" if job.host.gpu_util_frac is None else "launch", share_frac=job.trainer.on_cpu_frac)


def _busy_alone(job: Job) -> Verdict:
    main, util = job.trainer, job.host.gpu_util_frac
    what = f"The trainer is on a core {percent(main.on_cpu_frac)} of the time"
    if main.run_queue_frac >= _MIN_SHARE:
        what += f", ready without a core {percent(main.run_queue_frac)},"
    what += " and has no worker processes"
    rest: CauseName = "compute" if util is None else "launch"
    tail = "." if util is None else f", the GPU is busy {percent(util)}."
    return Verdict("unknown", main.busy_frac, "low", what + tail, between=("preprocess", rest))


def _unseen(pid: int) -> Finding:
    what = f"Process {pid} was not seen long enough to say anything."
    return Finding(
        cause="unknown",
        stall_frac=None,
        confidence="low",
        summary=what,
        between=("preprocess", "compute"),
        separate_with=_SEPARATE,
    )
