"""A trainer, its workers and the machine as seen from outside, and the rows of evidence that they give. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core import procshare
from headrace.core.procshare import Host, Share
from headrace.records.run import Evidence
from headrace.records.rundir import Machine

#: Workers that are on a core, ready or in a read for this much of the time are never ahead of the trainer.
_SATURATED = 0.85
#: Waits of a worker that are its dataset's: the others (a pipe) are for work to do.
_FETCH_WAITS = ("file", "socket", "fault", "sleep", "lock")


@dataclass(frozen=True)
class Job:
    """A trainer, its workers and the machine, over one window."""

    trainer: Share
    workers: list[Share]
    host: Host
    machine: Machine
    #: Whether it was looked at what the threads are blocked on.
    looked: bool

    def mean(self, fracs: Sequence[float]) -> float:
        """The mean over the workers; 0 without any."""
        return sum(fracs) / len(fracs) if fracs else 0.0


def data_wait_frac(job: Job) -> float | None:
    """The share of the time in which the trainer waits for its workers; None when that can not be seen.

    It reads its batches from a pipe, or waits on a lock for the pin thread; a GPU that runs meanwhile bounds it.
    """
    waiting = job.trainer.waiting("pipe")
    if busy_frac(job) >= _SATURATED:
        waiting += job.trainer.waiting("lock")
        if not job.looked:
            waiting = job.trainer.blocked_frac
    elif not job.looked:
        return None
    util = job.host.gpu_util_frac
    return waiting if util is None else min(waiting, 1.0 - util)


def busy_frac(job: Job) -> float:
    """How much of the time the mean worker works on a batch: on a core, ready for one, or in a wait of its dataset."""
    return job.mean([min(w.busy_frac + fetch_wait_frac(w), 1.0) for w in job.workers])


def fetch_wait_frac(part: Share) -> float:
    """Blocked time that is the dataset's: seen in the looks, else only what the kernel calls a disk wait."""
    return part.waiting(*_FETCH_WAITS) if part.waits else min(part.disk_frac, part.blocked_frac)


def main_wait(parts: Sequence[Share]) -> str | None:
    """The wait of the datasets that takes the most time, in its own words."""
    totals: dict[str, float] = {}
    for part in parts:
        for text, frac in part.words.items():
            if procshare.kind_of(text) in _FETCH_WAITS:
                totals[text] = totals.get(text, 0.0) + frac
    return max(totals, key=lambda text: totals[text]) if totals else None


def num_allowed_cpus(job: Job) -> int | None:
    """The narrowest affinity of the trainer and its workers, in CPUs; None when it was not read."""
    masks = [part.num_allowed_cpus for part in [job.trainer, *job.workers] if part.num_allowed_cpus]
    return min(masks, default=None)


def foreign_cores(job: Job) -> float | None:
    """Cores used by processes that are not of this job; None without a figure for all."""
    if job.host.busy_cores is None:
        return None
    return max(job.host.busy_cores - sum(procshare.cores(part) for part in [job.trainer, *job.workers]), 0.0)


def evidence(job: Job) -> list[Evidence]:
    """All rows that were measured; what was not measured has no row."""
    rows = _process_rows("trainer", [job.trainer]) + (_process_rows("workers", job.workers) if job.workers else [])
    wait = data_wait_frac(job) if job.workers else None
    if wait is not None:
        rows.append(Evidence(name="trainer waits for workers (sampled)", value=wait, unit="frac"))
    where = main_wait(job.workers or [job.trainer])
    if where is not None:
        rows.append(Evidence(name="most blocked on", value=where, unit="text"))
    return rows + _host_rows(job)


def _process_rows(name: str, parts: Sequence[Share]) -> list[Evidence]:
    count = len(parts)
    rows = [("num", count, "count")] if name == "workers" else []
    fracs: list[tuple[str, float | int | None, str]] = [
        *rows,
        ("on a core", sum(p.on_cpu_frac for p in parts) / count, "frac"),
        ("run-queue wait", sum(p.run_queue_frac for p in parts) / count, "frac"),
        ("blocked", sum(p.blocked_frac for p in parts) / count, "frac"),
        ("threads each", max(p.num_threads for p in parts), "count"),
        ("other threads on a core", sum(p.others_on_cpu_cores for p in parts), "cores"),
        ("major faults per second", sum(p.major_faults_per_s for p in parts), "count"),
        ("read from disk per second", _total([p.read_bytes_per_s for p in parts]), "bytes"),
        ("read calls per second", _total([p.rchar_bytes_per_s for p in parts]), "bytes"),
        ("private memory growth per second", _total([p.dirty_growth_bytes_per_s for p in parts]), "bytes"),
    ]
    return [
        Evidence(name=f"{name}: {what}", value=value, unit=unit) for what, value, unit in fracs if value is not None
    ]


def _total(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _host_rows(job: Job) -> list[Evidence]:
    host, machine = job.host, job.machine
    rows: list[tuple[str, float | int | str | None, str]] = [
        ("allowed cores idle", host.idle_cores, "cores"),
        ("allowed cores used by other programs", foreign_cores(job), "cores"),
        ("allowed CPUs", num_allowed_cpus(job), "count"),
        ("CPU quota", machine.cpu_quota_cores, "cores"),
        ("throttled by the quota", host.throttled_cores or None, "cores"),
        ("CPU pressure", host.psi_cpu_frac, "frac"),
        ("I/O pressure", host.psi_io_frac, "frac"),
        ("memory pressure", host.psi_memory_frac, "frac"),
        ("memory limit hits", host.memory_limit_hits or None, "count"),
        ("GPU utilisation", host.gpu_util_frac, "frac"),
        ("GPU held back by power or heat", host.gpu_throttled_frac, "frac"),
        ("PCIe link under load", host.slow_link, "text"),
    ]
    return [Evidence(name=name, value=value, unit=unit) for name, value, unit in rows if value is not None]
