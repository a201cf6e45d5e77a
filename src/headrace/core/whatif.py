"""What a change would bring: measured service times into the pipeline model, before and after. Pure.

Every speed-up is predicted(after) / predicted(before) applied to what was measured, so that what the model leaves out
cancels; it never exceeds the ceiling (data for free).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from . import stats
from .causes import pool_frac
from .charge import DESERIALISE_NS_PER_BYTE, NS_PER_TENSOR, SERIALISE_NS_PER_BYTE
from .measure import Facts
from .pipeline import SERVE_SHARE_FRAC, Config, Measured, predict, smallest_good

#: What ``next()`` takes for a ready batch of a tensor or two, where no worker was there to measure it: several hops
#: between two processes. Measured 1.2 to 5.6 ms on a 2-core virtual machine (longer after longer steps), 2.4 at 25 ms.
HANDOVER_NS = 2_000_000.0
MAX_REPLAY = 300
#: Steps and blocks of one prediction: enough for 1 %, and a report has half a second for all of them.
NUM_STEPS, NUM_BLOCKS = 500, 4


@dataclasses.dataclass(frozen=True)
class Gain:
    """Ratio of step rates, with its 95 % interval."""

    speedup: float
    lo: float
    hi: float


def measured(facts: Facts) -> Measured | None:
    """The model's input, from one run; None when no fetch was seen."""
    tasks = facts.tasks[-MAX_REPLAY:]
    steps = [step for step in facts.view.steps if step.body_ns > 0]
    if not tasks or len(steps) < 3:
        return None
    stretch = 1.0 - min(facts.body_run_queue_frac, 0.9)
    serialise, serve, deserialise = transport_ns(facts)
    return Measured(
        fetch=[(max(task.on_cpu_ns - task.collate_ns, 0), task.blocked_ns) for task in tasks],
        collate_ns=[min(task.collate_ns, task.on_cpu_ns) for task in tasks],
        body_ns=[step.body_ns * stretch for step in steps[-MAX_REPLAY:]],
        body_on_cpu_frac=min(facts.body_on_cpu_frac / max(stretch, 0.1), 1.0),
        cores=cores(facts),
        serialise_ns=serialise,
        serve_ns=serve,
        deserialise_ns=deserialise,
        body_threads=1.0,
        fetch_threads=fetch_threads(facts),
    )


def cores(facts: Facts) -> float:
    """Cores this job may use here and now."""
    host = facts.host
    free = host.free_cores
    if free is None:
        return 1.0
    if host.narrow_cpus:
        free = min(free, float(host.narrow_cpus))
    return max(free, 0.25)


def fetch_threads(facts: Facts) -> float:
    """Threads on a core while a worker's fetch is; 1 without workers: torch gives a worker one thread."""
    pool = pool_frac(facts)
    return 1.0 / (1.0 - pool) if pool < 1.0 else 1.0


def transport_ns(facts: Facts) -> tuple[float, float, float]:
    """CPU per batch to hand it over: (worker before it is sent, worker while it is received, trainer).

    Measured with workers, else from its size.
    """
    sizes = [(task.num_bytes, task.num_tensors or 0) for task in facts.tasks if task.num_bytes is not None]
    num_bytes = stats.mean([float(b) for b, _ in sizes]) if sizes else 0.0
    tensors = stats.mean([float(t) for _, t in sizes]) if sizes else 0.0
    worker = num_bytes * SERIALISE_NS_PER_BYTE + tensors * NS_PER_TENSOR
    trainer = num_bytes * DESERIALISE_NS_PER_BYTE + tensors * NS_PER_TENSOR
    steps = facts.view.steady
    if not facts.num_workers:
        return worker * (1 - SERVE_SHARE_FRAC), worker * SERVE_SHARE_FRAC, trainer + HANDOVER_NS
    if steps:
        trainer = stats.median([float(step.main_on_cpu_ns) for step in steps])
        others = facts.host.worker_other_on_cpu_cores
        if others is not None and facts.tasks and fetch_threads(facts) < 1.05:
            worker = others * facts.host.span_ns / len(facts.tasks)
    serve = worker * SERVE_SHARE_FRAC
    if facts.handover_ns is not None:
        trainer = max(trainer, facts.handover_ns - serve)
    return worker - serve, serve, trainer


def current(facts: Facts) -> Config:
    """The loader's arguments as they are."""
    info = facts.view.info
    return Config(
        num_workers=facts.num_workers,
        prefetch_factor=info.get("prefetch_factor") or 2,
        persistent_workers=bool(info.get("persistent_workers")),
        in_order=bool(info.get("in_order", True)),
    )


def ceiling(facts: Facts) -> float:
    """The speed-up if data were free."""
    return facts.total_ns / max(facts.total_ns - facts.stall_ns, 1.0)


def gain(
    facts: Facts,
    config: Config | None = None,
    change: Callable[[Measured], Measured] | None = None,
    num_blocks: int = NUM_BLOCKS,
) -> Gain | None:
    """What another configuration, or other service times, would bring for the whole loader's time.

    What the model gets wrong about now it partly gets wrong about then: the truth lies between measured / predicted and
    predicted / predicted, so the middle is their geometric mean and both lie inside the interval (as in
    ``pipeline.speedup``).
    """
    base = measured(facts)
    steady = facts.view.steady
    if base is None or not steady:
        return None
    now_ns = sum(step.step_ns for step in steady) / len(steady) - facts.pause_ns / len(steady)
    before = _before_ns(facts, base)
    changed = change(base) if change else base
    after = predict(changed, config or current(facts), num_steps=NUM_STEPS, num_blocks=num_blocks)
    if min(now_ns, before, after.step_ns_mean) <= 0:
        return None
    bare, relative = now_ns / after.step_ns_mean, before / after.step_ns_mean
    low = min(bare, relative) * after.step_ns_mean / max(after.step_ns_hi, 1.0)
    high = max(bare, relative) * after.step_ns_mean / max(after.step_ns_lo, after.step_ns_mean / 2)
    return _whole(facts, now_ns * len(steady), (low, math.sqrt(bare * relative), high))


def _before_ns(facts: Facts, base: Measured) -> float:
    """What the model says of the configuration that was measured; once per loader."""
    if facts.predicted_now_ns is None:
        facts.predicted_now_ns = predict(base, current(facts), num_steps=NUM_STEPS, num_blocks=0).step_ns_mean
    return facts.predicted_now_ns


def _whole(facts: Facts, steady_ns: float, speedups: tuple[float, float, float]) -> Gain:
    """From the steady steps' speed-up to that of the whole time: epochs and pauses stay as they are."""
    rest = facts.total_ns - steady_ns
    lo, mid, hi = (facts.total_ns / max(rest + steady_ns / max(ratio, 0.01), 1.0) for ratio in speedups)
    top = ceiling(facts)
    return Gain(min(mid, top), min(lo, top), min(max(hi, mid), top * 1.02))


def removed(facts: Facts, ns: float, error_frac: float = 0.1) -> Gain:
    """The speed-up when ``ns`` of the loader's time vanish."""
    total = float(facts.total_ns)
    ns = min(ns, total * 0.98)

    def ratio(part: float) -> float:
        return total / (total - min(part, total * 0.98))

    return Gain(ratio(ns), ratio(ns * (1 - error_frac)), ratio(ns * (1 + error_frac)))


def best_workers(facts: Facts, prefetch: tuple[int, ...] = (2,)) -> tuple[Config, Gain] | None:
    """The smallest number of workers within 1 % of the best predicted."""
    base = measured(facts)
    if base is None:
        return None
    now = current(facts)
    limit = max(int(cores(facts) + 0.5), 1)
    blocked = stats.mean([b for _, b in base.fetch])
    on_cpu = stats.mean(base.fetch_cpu_ns())
    body = max(stats.mean(base.body_ns), 1.0)
    if blocked > on_cpu:  # waiting workers need no core each
        limit = max(limit, min(int((blocked + on_cpu) / body * 1.5) + 2, 8 * limit, 64))
    numbers = sorted(
        {*range(1, min(limit, 8) + 1), *(int(limit * k / 8) for k in range(1, 9)), max(now.num_workers, 1)} - {0}
    )
    tried = [dataclasses.replace(now, num_workers=n, prefetch_factor=p) for n in numbers for p in prefetch]
    config = smallest_good(base, tried)
    result = gain(facts, config)
    return None if result is None else (config, result)
