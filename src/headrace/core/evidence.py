"""The rows and the sentence that a finding shows. Pure."""

from __future__ import annotations

from collections.abc import Callable

from ..records.run import Evidence, Hotspot
from . import stats
from .causes import Verdict, memory_frac, pool_frac, straggler_frac
from .measure import Facts

#: (name, value, unit)
_Row = tuple[str, float | int | str | None, str]

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
    own = _OWN_ROWS.get(verdict.cause)
    for row in own(facts) if own else ():
        add(*row)
    add("idle cores", host.idle_cores, "cores")
    add("allowed cores", host.allowed_cores, "cores")
    add("cores used by the job", host.job_cores, "cores")
    add("cores used by others", host.outside_cores, "cores")
    for row in _seen_in_stacks(verdict.cause, hotspots):
        add(*row)
    return out


def _straggler(facts: Facts) -> list[_Row]:
    fetches = [float(task.fetch1 - task.fetch0) for task in facts.tasks]
    return [
        ("fetch p50", stats.median(fetches), "ns"),
        ("fetch max", max(fetches), "ns"),
        ("wait for slow batches", facts.slow_wait_frac, "frac"),
        ("wait that only order causes", straggler_frac(facts), "frac"),
    ]


def _transport(facts: Facts) -> list[_Row]:
    sizes = [task for task in facts.tasks if task.num_bytes is not None]
    if not sizes:
        return []
    return [
        ("bytes per batch", round(stats.mean([float(task.num_bytes or 0) for task in sizes])), "bytes"),
        ("tensors per batch", round(stats.mean([float(task.num_tensors or 0) for task in sizes])), "count"),
    ]


def _epoch(facts: Facts) -> list[_Row]:
    num = len(facts.view.passes)
    return [("epochs seen", num, "count"), ("pause per epoch", facts.epoch_excess_ns / max(num, 1), "ns")]


def _outside(facts: Facts) -> list[_Row]:
    return [
        ("pauses inside epochs", facts.num_pauses, "count"),
        ("time between epochs", facts.share(facts.gap_ns), "frac"),
        ("time in validation loops", facts.share(facts.nested_ns), "frac"),
        ("time in torch.save", facts.share(facts.save_ns), "frac"),
    ]


def _memory(facts: Facts) -> list[_Row]:
    host = facts.host
    return [
        ("CPU in page faults", memory_frac(facts), "frac"),
        ("private memory growth", host.private_dirty_growth_bytes_per_s, "bytes/s"),
        ("memory used of limit", host.memory_used_frac, "frac"),
        ("memory limit hits", host.memory_limit_hits_per_s, "1/s"),
        ("memory pressure (PSI)", host.psi_memory_frac, "frac"),
    ]


def _oversubscribed(facts: Facts) -> list[_Row]:
    host = facts.host
    return [
        ("CPU quota", host.quota_cores, "cores"),
        ("throttled", host.throttled_frac, "frac"),
        ("allowed CPUs", host.narrow_cpus, "count"),
        ("CPUs of the machine", host.machine_cores, "count"),
        ("threads per worker", host.worker_threads, "count"),
        ("fetch CPU in thread pools", pool_frac(facts), "frac"),
    ]


def _storage(facts: Facts) -> list[_Row]:
    host = facts.host
    return [
        ("read from storage", host.read_bytes_per_s, "bytes/s"),
        ("read, page cache included", host.rchar_bytes_per_s, "bytes/s"),
        ("major faults", host.major_faults_per_s, "1/s"),
        ("I/O pressure (PSI)", host.psi_io_frac, "frac"),
    ]


_OWN_ROWS: dict[str, Callable[[Facts], list[_Row]]] = {
    "straggler": _straggler,
    "transport": _transport,
    "epoch": _epoch,
    "outside": _outside,
    "memory": _memory,
    "oversubscribed": _oversubscribed,
    "storage": _storage,
}


def _seen_in_stacks(cause: str, hotspots: list[Hotspot]) -> list[_Row]:
    """What the hottest sampled line waits for, or does, where that bears on the cause."""
    blocked = next((spot for spot in hotspots if spot.state != "running"), None)
    running = next((spot for spot in hotspots if spot.state == "running"), None)
    if cause == "storage" and blocked is not None:
        return [("blocked on", blocked.state, "text"), ("blocked at", f"{blocked.site} {blocked.function}", "text")]
    if cause in ("preprocess", "workers") and running is not None:
        text = f"{running.share_frac:.0%} in {running.what or running.function} at {running.site}"
        return [("hottest", text, "text")]
    return []
