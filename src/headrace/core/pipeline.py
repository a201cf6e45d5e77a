"""What a training loop over torch's ``DataLoader`` would cost per step in another configuration.

``core.loop`` plays the loop, fed with the service times that a run measured; here it is asked the questions: what would
a configuration cost (``predict``), how much faster is that than now (``speedup``), and which is the smallest that is as
good as any (``smallest_good``). First-principles bounds (``floors_ns``) hold every answer.

Service times are replayed in the order in which they were measured, not drawn at random: rare slow batches keep their
share, and what recurs keeps its period (every 4th batch slow means that one of four workers does all slow ones).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from headrace.core import stats
from headrace.core.loop import SERVE_SHARE_FRAC, Config, Loop, Measured, num_settle

__all__ = [
    "SERVE_SHARE_FRAC",
    "Bound",
    "Config",
    "Measured",
    "Prediction",
    "floors_ns",
    "predict",
    "smallest_good",
    "speedup",
]

#: How far benchmarks/pipeline_check.py found the model off, as about two standard deviations: without contention, and
#: what is added when the cores are full (caches, hyperthreads and the kernel's slices are not in the model). From 1 s
#: runs on 2 cores that were not always quiet (November 2026), so they contain the noise of the measurement: too wide
#: rather than too narrow. The order of events itself is exact (test_the_order_of_events_is_that_of_torch).
MODEL_ERROR_FRAC, FULL_CORES_ERROR_FRAC = 0.08, 0.10
#: Steps for comparing configurations with each other; enough because all of them replay the same batches.
SEARCH_STEPS = 500
#: Blocks of the jackknife behind an interval: each costs a quarter of a simulation.
NUM_BLOCKS = 8

_T = TypeVar("_T")
Bound = Literal["body", "workers", "cores", "transport", "pin", "order", "serial", "epoch"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Mean step time and data wait of one configuration, with the interval of the step and the resource that binds."""

    step_ns_mean: float
    wait_ns_mean: float
    step_ns_lo: float
    step_ns_hi: float
    bound: Bound
    floor_ns: float
    """The largest first-principles bound; no order of events is faster."""
    num_events: int
    """Work done to predict: for tests of its cost."""


def predict(
    measured: Measured, config: Config, *, num_steps: int = 1500, seed: int = 0, num_blocks: int = NUM_BLOCKS
) -> Prediction:
    """Mean step time of ``config``, from service times measured under any other.

    Args:
        measured: What the batches and the bodies cost.
        config: What to predict.
        num_steps: Steps to simulate.
        seed: Where a replay of more batches than ``num_steps`` begins.
        num_blocks: Blocks of the jackknife; 0 leaves only the model's error in the interval, at a third of the cost.

    Returns:
        The mean with a 95 % interval: the spread of the measured values (``_spread_ns``) and the model's own error
        (``MODEL_ERROR_FRAC``), added as independent.
    """
    base = _simulate(measured, config, num_steps, seed)
    spread_ns, events = _spread_ns(measured, config, num_steps, seed, num_blocks)
    half = math.hypot(spread_ns, _model_error_ns(measured, config, base.step_ns))
    floor, _ = _floor(measured, config)
    return Prediction(
        step_ns_mean=base.step_ns,
        wait_ns_mean=base.wait_ns,
        step_ns_lo=max(base.step_ns - half, 0.0),
        step_ns_hi=base.step_ns + half,
        bound=_name_bound(measured, config, base),
        floor_ns=floor,
        num_events=base.num_events + events,
    )


def speedup(
    measured: Measured, now: Config, new: Config, step_ns: float, *, seed: int = 0
) -> tuple[float, tuple[float, float]]:
    """How much faster steps would come with ``new``: step time now / then, with a 95 % interval.

    What the model gets wrong about ``now`` it partly gets wrong about ``new`` too (costs that it does not know), so the
    truth lies between ``step_ns`` / predicted and predicted / predicted: the geometric mean, and both inside the
    interval.

    Args:
        measured: What the batches and the bodies cost.
        now: The configuration that was measured.
        new: The one that is proposed.
        step_ns: Mean step time that was measured with ``now``, over the same kind of steps.
        seed: As in ``predict``.
    """
    before, after = predict(measured, now, seed=seed, num_blocks=0), predict(measured, new, seed=seed)
    if step_ns <= 0 or after.step_ns_mean <= 0 or before.step_ns_mean <= 0:
        return 1.0, (1.0, 1.0)
    bare, relative = step_ns / after.step_ns_mean, before.step_ns_mean / after.step_ns_mean
    middle = math.sqrt(bare * relative)
    low = min(bare, relative) * after.step_ns_mean / after.step_ns_hi
    high = max(bare, relative) * after.step_ns_mean / max(after.step_ns_lo, after.step_ns_mean / 2)
    return middle, (low, high)


def smallest_good(
    measured: Measured,
    candidates: Iterable[Config],
    *,
    tolerance_frac: float = 0.01,
    max_workers: int | None = None,
    seed: int = 0,
) -> Config:
    """The candidate with the fewest workers (then the least prefetch) within ``tolerance_frac`` of the best predicted.

    Args:
        measured: What the batches and the bodies cost.
        candidates: In any order.
        tolerance_frac: What a smaller configuration may cost in step time; it saves memory.
        max_workers: Workers that fit into memory; larger candidates are left out. None: no limit.
        seed: As in ``predict``.

    Raises:
        ValueError: No candidate is left.
    """
    fitting = sorted(
        (c for c in candidates if max_workers is None or c.num_workers <= max_workers),
        key=lambda c: (c.num_workers, c.prefetch_factor, not c.in_order),
    )
    if not fitting:
        raise ValueError(f"no candidate has at most {max_workers} workers")
    floors = [_floor(measured, c)[0] for c in fitting]
    tried: list[tuple[float, Config]] = []
    for i, config in enumerate(fitting):
        best = min((step for step, _ in tried), default=math.inf)
        if best <= min(floors[i:]) * (1 + tolerance_frac):
            break  # nothing that is left can be better by more than the tolerance
        if floors[i] <= best * (1 + tolerance_frac):
            tried.append((_simulate(measured, config, SEARCH_STEPS, seed).step_ns, config))
    best = min(step for step, _ in tried)
    return next(config for step, config in tried if step <= best * (1 + tolerance_frac))


def floors_ns(measured: Measured, config: Config) -> dict[Bound, float]:
    """First-principles lower bounds of the mean step time, by the resource behind each. All in ns.

    ``workers`` counts a worker as busy while it fetches, or while it is on a core for fetch and transport together: its
    helper threads work while the fetch is blocked.
    """
    body = stats.mean(measured.body_ns)
    on_cpu = stats.mean(measured.fetch_cpu_ns())
    blocked = stats.mean([blocked for _, blocked in measured.fetch])
    pin = measured.pin_ns if config.pin_memory else 0.0
    cpu = on_cpu * measured.fetch_threads + body * measured.body_on_cpu_frac * measured.body_threads + pin
    if config.num_workers == 0:
        return {"serial": body + on_cpu + blocked + pin, "cores": cpu / measured.cores}
    handed = measured.serialise_ns + measured.serve_ns
    received = measured.serve_ns + measured.deserialise_ns
    floors: dict[Bound, float] = {
        "body": body + (0.0 if config.pin_memory else received),
        "workers": max(on_cpu + blocked, on_cpu + handed) / config.num_workers,
        "cores": (cpu + handed + measured.deserialise_ns) / measured.cores,
    }
    if config.pin_memory:
        floors["pin"] = pin + received
    return floors


def _floor(measured: Measured, config: Config) -> tuple[float, Bound]:
    """The largest of the lower bounds, and its name."""
    floors = floors_ns(measured, config)
    name = max(floors, key=lambda key: floors[key])
    return floors[name], name


def _model_error_ns(measured: Measured, config: Config, step_ns: float) -> float:
    """Half width of the model's own 95 % error: grows with the square of how full the cores are."""
    if step_ns <= 0:
        return 0.0
    full = min(1.0, floors_ns(measured, config).get("cores", 0.0) / step_ns) if config.num_workers else 0.0
    return step_ns * (MODEL_ERROR_FRAC + FULL_CORES_ERROR_FRAC * full * full)


def _spread_ns(measured: Measured, config: Config, num_steps: int, seed: int, num_blocks: int) -> tuple[float, int]:
    """Half width of the 95 % interval that comes from having measured only so many batches; with the events it took.

    Delete-a-block jackknife: the model is run with one contiguous block of the measurement left out at a time. Blocks
    keep the autocorrelation (H. R. Kunsch, "The jackknife and the bootstrap for general stationary observations",
    Annals of Statistics 17(3), 1989), and a block that holds the only slow batches shows what hangs on them. A
    bootstrap over blocks needs dozens of simulations for as steady a number.
    """
    num = min(num_blocks, len(measured.fetch), len(measured.body_ns))
    if num < 2:
        return 0.0, 0
    steps = max(1, num_steps // 4)
    runs = [_simulate(_without_block(measured, i, num), config, steps, seed) for i in range(num)]
    means = [run.step_ns for run in runs]
    centre = stats.mean(means)
    error = math.sqrt((num - 1) / num * math.fsum((value - centre) ** 2 for value in means))
    return stats.t_quantile(0.975, num - 1) * error, sum(run.num_events for run in runs)


def _without_block(measured: Measured, block: int, num_blocks: int) -> Measured:
    """``measured`` without the ``block``-th of ``num_blocks`` pieces of its fetches and of its bodies."""

    def cut(values: Sequence[_T]) -> list[_T]:
        start, end = (len(values) * i // num_blocks for i in (block, block + 1))
        return [*values[:start], *values[end:]]

    collate = measured.collate_ns
    kept = collate if isinstance(collate, (int, float)) else cut(collate)
    return replace(measured, fetch=cut(measured.fetch), body_ns=cut(measured.body_ns), collate_ns=kept)


@dataclass(frozen=True)
class _Simulated:
    """What one simulation gave: means in ns, and the share of the data wait in which another batch was ready."""

    step_ns: float
    wait_ns: float
    reorder_frac: float
    epoch_frac: float
    num_events: int


def _name_bound(measured: Measured, config: Config, seen: _Simulated) -> Bound:
    """The resource that holds the step back: the largest floor, unless the order of batches or epochs costs more."""
    floor, name = _floor(measured, config)
    if config.num_workers and seen.step_ns > floor * 1.05:
        if seen.epoch_frac * seen.step_ns > floor * 0.05:
            return "epoch"
        if config.in_order and seen.reorder_frac > 0.3:
            return "order"
    received = measured.deserialise_ns + measured.serve_ns
    if name == "body" and not config.pin_memory and received > stats.mean(measured.body_ns):
        return "transport"
    return name


def _simulate(measured: Measured, config: Config, num_steps: int, seed: int) -> _Simulated:
    """Steady steps, or whole epochs when ``measured`` says how long they are."""
    if config.num_workers == 0:
        return _serial(measured, config)
    steady = Loop(measured, config, _replay(measured, num_steps, seed), epoch=False)
    steady.run(num_steps + num_settle(config))
    floor, _ = _floor(measured, config)
    step, wait = steady.means()
    # A window of steps may begin with a fuller pipeline than it ends with; in the long run nothing beats the floor.
    step, wait = max(step, floor), wait + max(0.0, floor - step)
    events, epoch_frac = steady.num_events, 0.0
    if measured.steps_per_epoch:
        cost, more = _epoch_cost_ns(measured, config, step, seed)
        share = cost / measured.steps_per_epoch
        step, wait, events, epoch_frac = step + share, wait + share, events + more, share / (step + share)
    return _Simulated(step, wait, steady.reorder_frac(), epoch_frac, events)


def _serial(measured: Measured, config: Config) -> _Simulated:
    """Without workers all follows in one thread, so means add up exactly; fewer cores than threads stretch it."""

    def stretch(threads: float) -> float:
        return max(1.0, (threads + measured.shared_cpu_cores) / measured.cores)

    pin = measured.pin_ns if config.pin_memory else 0.0
    on_cpu, blocked = stats.mean(measured.fetch_cpu_ns()), stats.mean([blocked for _, blocked in measured.fetch])
    body, frac = stats.mean(measured.body_ns), measured.body_on_cpu_frac
    wait = (on_cpu + pin) * stretch(measured.fetch_threads) + blocked
    step = wait + body * (1 - frac) + body * frac * stretch(measured.body_threads)
    return _Simulated(max(step, _floor(measured, config)[0]), wait, 0.0, 0.0, 1)


def _epoch_cost_ns(measured: Measured, config: Config, steady_ns: float, seed: int) -> tuple[float, int]:
    """What one epoch costs beyond its steady steps: new workers and the empty pipeline; with the number of events."""
    length = min(measured.steps_per_epoch or 1, max(SEARCH_STEPS, 4 * config.num_workers * config.prefetch_factor))
    loop = Loop(measured, config, _replay(measured, length, seed), epoch=True)
    loop.run(length)
    return max(0.0, loop.now - steady_ns * length), loop.num_events


def _replay(measured: Measured, num_steps: int, seed: int) -> list[int]:
    """Indices of measured batches for a run of ``num_steps``: in order, round and round.

    Of a longer measurement that window is taken, among eight, whose mean fetch is nearest to that of all: a rare slow
    batch then has its right share.
    """
    num = len(measured.fetch)
    if num <= num_steps:
        return list(range(num))
    costs = [cpu + blocked for cpu, (_, blocked) in zip(measured.fetch_cpu_ns(), measured.fetch, strict=True)]
    aim = stats.mean(costs)
    starts = random.Random(seed).sample(range(num), min(8, num))
    windows = [[(start + i) % num for i in range(num_steps)] for start in starts]
    return min(windows, key=lambda window: abs(stats.mean([costs[i] for i in window]) - aim))
