"""Names the one cause, by the rules for neighbours of docs/causes. Pure.

The largest share of the exposed time decides. Candidates are shares of the loader's whole time; the fetch's share is
then told apart by what the awaited fetches did: blocked, on a core, or waiting for one.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

from ..records.run import CauseName
from . import stats
from .measure import Facts

#: Less than this share of the time in any one place is not worth a change: the device is the limit.
WORTH_FRAC = 0.05
#: Starting workers costs 0.1-0.3 s whatever the program does, and a short observation holds few steps beside it.
EPOCH_WORTH_FRAC = 0.08
#: Waking processes costs 1-3 ms a batch and more on a busy machine: a cause only where steps are as short as that.
LATENCY_WORTH_FRAC = 0.2
#: An allowed core counts as idle from here: the watching itself and the kernel take the rest.
IDLE_CORES = 0.7
#: Threads of a worker other than its main one use this share of its CPU: a thread pool is at work.
POOL_FRAC = 0.2
#: CPU a minor fault with a 4 KiB copy takes: 0.5-1.2 us on bare x86-64, up to 4 us in a virtual machine.
FAULT_NS = (500.0, 4_000.0)
SATURATED_FRAC = 0.85
#: Share of the fetches' CPU in copied pages from which they are the cause.
COPIED_FRAC = 0.25
#: Workers per core from which their number is called too high (deit issue 81: 8 per core, half of 2 per core was best).
CROWD_PER_CORE = 6
STARVED_IDLE_CORES = 0.35

assert {"storage", "workers", "preprocess", "oversubscribed"} <= set(get_args(CauseName))


@dataclasses.dataclass
class Verdict:
    """A cause, the runner-up, and shares of the loader's whole time."""

    cause: CauseName
    share_frac: float
    runner_up: CauseName | None
    runner_share_frac: float
    detail: str = ""
    between: tuple[CauseName, CauseName] | None = None


def decide(facts: Facts, rank_share_frac: float = 0.0, gain_of: dict[str, float] | None = None) -> Verdict:
    """The cause of one loader's exposed time.

    Args:
        facts: what was measured.
        rank_share_frac: share of the time in which this rank waited for a later one.
        gain_of: predicted speed-ups the rules ask for, 1.0 = none: ``quota``, ``affinity``, ``threads``, ``fewer``.
    """
    gains = gain_of or {}
    shares = _shares(facts, rank_share_frac, gains)
    ranked = sorted(shares.items(), key=lambda item: -item[1][0])
    (cause, (share, detail)), rest = ranked[0], ranked[1:]
    runner, runner_share = (rest[0][0], rest[0][1][0]) if rest else (None, 0.0)
    if share < WORTH_FRAC:
        near = cause if share > 0.005 else None
        return Verdict("compute", facts.share(facts.parts_ns["step"]), near, share if near else 0.0)
    if runner_share < 0.005:
        runner = "compute"
        runner_share = facts.share(facts.parts_ns["step"])
    if cause == "unknown":
        return Verdict("unknown", share, runner, runner_share, detail, ("storage", "preprocess"))
    return Verdict(cause, share, runner, runner_share, detail)


def _shares(facts: Facts, rank_frac: float, gains: dict[str, float]) -> dict[CauseName, tuple[float, str]]:
    share, charged = facts.share, facts.charged_ns
    shares: dict[CauseName, tuple[float, str]] = {
        "epoch": (_epoch_frac(facts), ""),
        "outside": (share(facts.parts_ns["outside"]), ""),
        "rank": (rank_frac, ""),
        "collate": (share(charged["collate"]), ""),
        "transport": (_transport_frac(facts), ""),
        "pin": (share(charged["pin"]), ""),
        "copy": (share(facts.parts_ns["copy"]), ""),
        "sync": (share(facts.parts_ns["sync"]), ""),
    }
    fetch = share(charged["fetch"])
    if _starved(facts) or crowded(facts):  # neither worker nor trainer gets a core to hand a batch over with
        fetch += share(charged["latency"])
        shares["transport"] = (share(charged["transport"]), "")
    kind, detail = fetch_cause(facts, gains)
    straggling = straggler_frac(facts)
    waits = fetch + shares["collate"][0]
    if straggling > 0.5:
        shares["straggler"] = (waits, "")
        fetch = 0.0
        shares["collate"] = (0.0, "")
    if fetch:
        shares[kind] = (fetch, detail)
    if charged["unseen"] > 0:
        shares["unknown"] = (share(charged["unseen"]), "the workers' side was not recorded")
    shares |= _device_shares(facts)
    body = _cpu_step_loss(facts, gains)
    if body is not None:
        before = shares.get("oversubscribed", (0.0, ""))
        shares["oversubscribed"] = (before[0] + body, before[1] or "quota")
    return shares


def _epoch_frac(facts: Facts) -> float:
    """The pauses that recur with every epoch; one epoch's start happens once and decides nothing."""
    frac = facts.share(facts.epoch_excess_ns)
    return frac if frac >= EPOCH_WORTH_FRAC and len(facts.view.passes) > 1 else 0.0


def _transport_frac(facts: Facts) -> float:
    frac, latency = facts.share(facts.charged_ns["transport"]), facts.share(facts.charged_ns["latency"])
    return frac + latency if frac + latency >= LATENCY_WORTH_FRAC else frac


def _device_shares(facts: Facts) -> dict[CauseName, tuple[float, str]]:
    """What only a real device shows; none of it was measured on one yet."""
    host, step = facts.host, facts.share(facts.parts_ns["step"])
    found: dict[CauseName, tuple[float, str]] = {}
    if host.gpu_throttled_frac:
        found["throttle"] = (host.gpu_throttled_frac * step, "")
    if host.gpu_link_frac is not None and host.gpu_link_frac < 0.9:
        found["link"] = (facts.share(facts.parts_ns["copy"]), "")
        found["copy"] = (0.0, "")
    if facts.dry_frac >= 0.8 and facts.has_device_clock:
        found["launch"] = (max(1.0 - (host.gpu_util_frac or 1.0), 0.0) * step, "")
    return found


def _cpu_step_loss(facts: Facts, gains: dict[str, float]) -> float | None:
    """A throttled or crowded trainer loses time in the step itself: the share that lifting the limit would give."""
    queue = facts.body_run_queue_frac * facts.share(facts.parts_ns["step"])
    if _limited(facts) and gains.get("quota", 1.0) >= 1.05:
        return max(queue, 0.0)
    return None


def straggler_frac(facts: Facts) -> float:
    """How much of the steady wait only exists because a few slow batches hold ready ones back, 0..1.

    Slow batches must carry most of the wait, and the workers' mean rate must suffice, or else it is a matter of rate.
    """
    if not facts.num_workers or facts.slow_wait_frac < 0.5:
        return 0.0
    bodies = facts.median_body_ns
    fetches = [task.fetch1 - task.fetch0 for task in facts.tasks]
    rate_ns = stats.mean(fetches) / facts.num_workers
    steady = facts.view.steady
    step = sum(s.step_ns for s in steady) / max(len(steady), 1)
    lacking = max(rate_ns - bodies, 0.0)
    waited = max(step - bodies, 1.0)
    return max(1.0 - lacking / waited, 0.0)


def fetch_cause(facts: Facts, gains: dict[str, float]) -> tuple[CauseName, str]:
    """Blocked, on a core, or ready without one: which of the fetch's causes, and a word on why."""
    split = facts.fetch_split
    if split is None:
        return "unknown", "nothing is known of the fetch"
    if memory_frac(facts) >= COPIED_FRAC:
        return "memory", "faults"
    throttled = _limited(facts)
    if throttled and gains.get("quota", 1.0) >= 1.05:
        return "oversubscribed", "quota"
    if split["blocked"] >= max(split["on_cpu"] + split["run_queue"], 0.5):
        if _pressed(facts):
            return "memory", "reclaim"
        return "storage", ""
    if pool_frac(facts) >= POOL_FRAC and gains.get("threads", 1.0) >= 1.05:
        return "oversubscribed", "threads"
    if narrow(facts) and gains.get("affinity", 1.0) >= 1.05:
        return "oversubscribed", "affinity"
    if gains.get("fewer", 1.0) >= 1.05 or crowded(facts):
        return "oversubscribed", "workers"
    if _pressed(facts):
        return "memory", "reclaim"
    if _core_idled(facts):
        return "workers", ""
    return "preprocess", ""


def _starved(facts: Facts) -> bool:
    """Whether no core idles and workers outnumber the cores: then waking up is slow for want of a core."""
    cores, idle = facts.host.free_cores, facts.host.idle_cores
    if cores is None or idle is None:
        return False
    return idle < STARVED_IDLE_CORES and facts.num_workers >= 2 * max(cores, 1.0)


def crowded(facts: Facts) -> bool:
    """Whether workers so outnumber the cores that each of them mostly stands in the run queue.

    From several per core the count itself costs: each one starts, opens the data and holds batches for itself. What
    fewer would gain cannot be told from one run.
    """
    split, cores = facts.fetch_split, facts.host.free_cores
    if split is None or cores is None:
        return False
    many = facts.num_workers >= CROWD_PER_CORE * max(cores, 1.0)
    return many and split["run_queue"] >= 2 * split["on_cpu"]


def memory_frac(facts: Facts) -> float:
    """Share of the workers' CPU that went into copying pages that were shared with the trainer, 0..1.

    Every page fault of copy-on-write leaves a private page behind; faults of fresh allocations do not, once they are
    freed. A fault's cost differs by machine, so the measured system time stands for it within what is plausible.
    """
    host = facts.host
    faults, cpu, kept = host.worker_minor_faults_per_s, host.worker_on_cpu_cores, host.fault_kept_frac
    if not faults or not cpu or kept is None or kept < 0.4 or not facts.num_workers:
        return 0.0
    low, high = (faults * ns / (cpu * 1e9) for ns in FAULT_NS)
    return min(max(host.worker_system_frac or 0.0, low), high, 1.0)


def pool_frac(facts: Facts) -> float:
    """Share of the fetches' CPU that other threads than the fetching one used."""
    if not facts.num_workers:
        return 0.0  # the trainer's other threads have work of their own
    own = sum(task.on_cpu_ns for task in facts.tasks)
    whole = sum(max(task.process_cpu_ns, task.on_cpu_ns) for task in facts.tasks)
    return 1.0 - own / whole if whole else 0.0


def _limited(facts: Facts) -> bool:
    host = facts.host
    return bool(host.quota_cores) and (
        (host.throttled_frac or 0.0) > 0.05 or (host.quota_used_frac or 0.0) > SATURATED_FRAC
    )


def narrow(facts: Facts) -> bool:
    """Whether the job fills the few CPUs it may use, while the machine has more."""
    host = facts.host
    if not host.narrow_cpus or not host.machine_cores or host.narrow_cpus >= host.machine_cores:
        return False
    return (host.job_cores or 0.0) > SATURATED_FRAC * host.narrow_cpus


def _pressed(facts: Facts) -> bool:
    host = facts.host
    near = (host.memory_used_frac or 0.0) > 0.95 and (host.memory_limit_hits_per_s or 0.0) > 1.0
    return (
        near or (host.psi_memory_frac or 0.0) > 0.15 or bool(host.swap_bytes and (host.major_faults_per_s or 0.0) > 50)
    )


def _core_idled(facts: Facts) -> bool:
    host = facts.host
    if host.idle_cores is None:
        return not facts.num_workers
    # The mean over the time; while it waits, the trainer leaves its core to the workers.
    idle = host.idle_cores
    if facts.num_workers:
        idle += facts.share(facts.parts_ns["step"]) * facts.body_on_cpu_frac
    if host.quota_cores is not None and host.job_cores is not None:
        idle = min(idle, host.quota_cores - host.job_cores)
    return idle >= IDLE_CORES
