"""The rows and the sentence that a finding shows. Pure."""

from __future__ import annotations

from ..records.run import Evidence, Hotspot
from . import stats
from .causes import Verdict, memory_frac, pool_frac, straggler_frac
from .measure import Facts

_SENTENCE = {
    "storage": "the dataset is blocked",
    "workers": "too few workers: the dataset's code is on a core while an allowed core idles",
    "preprocess": "preprocessing needs all the cores there are",
    "oversubscribed": "too much wants the cores that are allowed",
    "collate": "batches are slow to build",
    "transport": "batches are slow to travel from worker to trainer",
    "pin": "page-locking holds batches up",
    "straggler": "a few slow samples hold ready batches back",
    "epoch": "every epoch starts with a pause",
    "memory": "memory: pages are copied or reclaimed while samples are made",
    "copy": "copies to the device hold it up",
    "sync": "the host waits for the device inside the step",
    "launch": "the host cannot issue work fast enough",
    "link": "the link to the device is slow",
    "throttle": "the device is throttled",
    "outside": "pauses between the steps (evaluation, checkpoints, logging)",
    "rank": "another rank is late",
    "unknown": "the evidence does not separate two causes",
}


def summary(facts: Facts, verdict: Verdict) -> str:
    """One sentence: what share of the time goes where."""
    if verdict.cause == "compute":
        return (
            f"Nothing to gain from data: the step itself takes {facts.share(facts.parts_ns['step']):.0%} of the time."
        )
    detail = {
        "quota": " (CPU quota)",
        "affinity": " (CPU affinity)",
        "threads": " (thread pools in the workers)",
        "workers": " (more workers than cores)",
    }
    what = _SENTENCE[verdict.cause] + detail.get(verdict.detail, "")
    return f"{verdict.share_frac:.0%} of the time: {what}."


def rows(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Evidence]:
    """What was measured, the cause's own signals first."""
    out: list[Evidence] = []

    def add(name: str, value: float | int | str | None, unit: str) -> None:
        if value is not None and not any(row.name == name for row in out):
            out.append(Evidence(name=name, value=round(value, 6) if isinstance(value, float) else value, unit=unit))

    host, split = facts.host, facts.fetch_split or {}
    add("stall", facts.share(facts.stall_ns), "frac")
    for name, label in (
        ("blocked", "fetch blocked"),
        ("on_cpu", "fetch on a core"),
        ("run_queue", "fetch in the run queue"),
    ):
        add(label, split.get(name), "frac")
    if verdict.cause == "straggler":
        fetches = [float(task.fetch1 - task.fetch0) for task in facts.tasks]
        add("fetch p50", stats.median(fetches), "ns")
        add("fetch max", max(fetches), "ns")
        add("wait for slow batches", facts.slow_wait_frac, "frac")
        add("wait that only order causes", straggler_frac(facts), "frac")
    if verdict.cause == "transport":
        sizes = [task for task in facts.tasks if task.num_bytes is not None]
        if sizes:
            add("bytes per batch", round(stats.mean([float(t.num_bytes or 0) for t in sizes])), "bytes")
            add("tensors per batch", round(stats.mean([float(t.num_tensors or 0) for t in sizes])), "count")
    if verdict.cause == "epoch":
        add("epochs seen", len(facts.view.passes), "count")
        add("pause per epoch", facts.epoch_excess_ns / max(len(facts.view.passes), 1), "ns")
    if verdict.cause == "outside":
        add("pauses inside epochs", facts.num_pauses, "count")
        add("time between epochs", facts.share(facts.gap_ns), "frac")
        add("time in validation loops", facts.share(facts.nested_ns), "frac")
        add("time in torch.save", facts.share(facts.save_ns), "frac")
    if verdict.cause == "memory":
        add("CPU in page faults", memory_frac(facts), "frac")
        add("private memory growth", host.private_dirty_growth_bytes_per_s, "bytes/s")
        add("memory used of limit", host.memory_used_frac, "frac")
        add("memory limit hits", host.memory_limit_hits_per_s, "1/s")
        add("memory pressure (PSI)", host.psi_memory_frac, "frac")
    if verdict.cause == "oversubscribed":
        add("CPU quota", host.quota_cores, "cores")
        add("throttled", host.throttled_frac, "frac")
        add("allowed CPUs", host.narrow_cpus, "count")
        add("CPUs of the machine", host.machine_cores, "count")
        add("threads per worker", host.worker_threads, "count")
        add("fetch CPU in thread pools", pool_frac(facts), "frac")
    add("idle cores", host.idle_cores, "cores")
    add("allowed cores", host.allowed_cores, "cores")
    add("cores used by the job", host.job_cores, "cores")
    add("cores used by others", host.outside_cores, "cores")
    if verdict.cause == "storage":
        add("read from storage", host.read_bytes_per_s, "bytes/s")
        add("read, page cache included", host.rchar_bytes_per_s, "bytes/s")
        add("major faults", host.major_faults_per_s, "1/s")
        add("I/O pressure (PSI)", host.psi_io_frac, "frac")
        blocked = [spot for spot in hotspots if spot.state != "running"]
        if blocked:
            add("blocked on", blocked[0].state, "text")
            add("blocked at", f"{blocked[0].site} {blocked[0].function}", "text")
    if verdict.cause in ("preprocess", "workers"):
        running = [spot for spot in hotspots if spot.state == "running"]
        if running:
            add(
                "hottest",
                f"{running[0].share_frac:.0%} in {running[0].what or running[0].function} at {running[0].site}",
                "text",
            )
    return out
