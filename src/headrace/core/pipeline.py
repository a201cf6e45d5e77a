"""What a training loop over torch's ``DataLoader`` would cost per step in another configuration.

A discrete-event model of the loop, fed with the service times that a run measured. Who runs where:

    trainer   next(): take from the stash, or receive + deserialise until the wanted batch is there; hand out ONE
              new index; body: on-CPU part, then the part in which it needs no core (device, sleep)
    worker k  index queue -> fetch: blocked part, then on-CPU part (with collate)      x num_workers
     helpers  threads of worker k: one serialises what it made, one serves file descriptors while the trainer
              deserialises; they share one interpreter (GIL) with the fetch, so they hold up its on-CPU part
    pin       with pin_memory a thread of the trainer deserialises and pins instead of next()

* Batch j goes to worker j mod n. With ``in_order=False`` an index goes to the next worker in turn that holds fewer
  than ``prefetch_factor``, and the first batch to arrive is returned (torch 2.14, ``_MultiProcessingDataLoaderIter``).
* A new index leaves only when a batch is *returned*: a batch that arrives early is stashed and feeds nobody.
* Cores are shared equally among all that are runnable, at most one core each. All runnable activities therefore
  progress at one common rate, and one *virtual* clock that runs at this rate orders their ends (processor sharing in
  virtual time, as in Parekh and Gallager 1993 for fair queueing): an event costs O(log n).
* Blocked phases take wall time only, whatever runs besides them.

Service times are replayed in the order in which they were measured, not drawn at random: rare slow batches keep their
share, and what recurs keeps its period (every 4th batch slow means that one of four workers does all slow ones).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from headrace.core import stats

#: From an index put into a worker's queue to its fetch, and from a batch put by a worker to the trainer awake: a
#: thread, a pipe and a scheduler in between. Measured on 2 cores.
LATENCY_NS = 150_000
#: How far the model itself was off in benchmarks/pipeline_check.py (about two standard deviations): without contention,
#: and what is added when the cores are full (caches, hyperthreads and the kernel's slices are not in the model).
MODEL_ERROR_FRAC, FULL_CORES_ERROR_FRAC = 0.03, 0.09
#: Share of a worker's CPU beside its fetch that falls into the trainer's next(): torch's ``file_descriptor`` strategy
#: passes each tensor's descriptor in a round trip. Measured with 1 to 64 tensors: 0.4 to 0.5.
SERVE_SHARE_FRAC = 0.45
#: Steps for comparing configurations with each other; enough because all of them replay the same batches.
SEARCH_STEPS = 500
#: Blocks of the jackknife behind an interval: each costs a third of a simulation.
NUM_BLOCKS = 8

_T = TypeVar("_T")
_Handler = Callable[[int], None]
Bound = Literal["body", "workers", "cores", "transport", "pin", "order", "serial", "epoch"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Service times of one loader and its loop. Times in ns, without run-queue wait (the model adds that by itself)."""

    fetch: Sequence[tuple[float, float]]
    """(on-CPU ns, blocked ns) per batch, in batch order, without collate. On-CPU of the fetching thread."""
    body_ns: Sequence[float]
    """Step time minus data wait, minus run-queue wait, in order."""
    cores: float
    """Cores that this job may use: the smaller of affinity and cgroup quota, divided by ranks on this machine."""
    body_on_cpu_frac: float
    """Share of the body in which the trainer's main thread is on a core, 0..1."""
    collate_ns: float | Sequence[float] = 0.0
    """On-CPU: per batch as ``fetch``, or the mean."""
    serialise_ns: float = 0.0
    """Worker-side CPU per batch before the trainer can see it (its queue's feeder thread)."""
    serve_ns: float = 0.0
    """Worker-side CPU per batch while the trainer deserialises; the trainer waits for it. Where only the sum of both is
    known: ``SERVE_SHARE_FRAC`` of it."""
    deserialise_ns: float = 0.0
    """Trainer-side CPU per received batch, inside next()."""
    pin_ns: float = 0.0
    """On-CPU per batch in the pin thread."""
    body_threads: float = 1.0
    """Threads on a core while the body's main thread is: CPU training runs torch's pool."""
    fetch_threads: float = 1.0
    """Threads on a core while a worker's fetch is. torch gives workers one thread of its own pool."""
    shared_cpu_cores: float = 0.0
    """Cores that other processes keep busy. They compete; they do not own what they use."""
    steps_per_epoch: int | None = None
    """With it the mean contains the epochs' starts (drained pipeline, new workers); without, steady steps only."""
    worker_start_ns: float = 0.0
    """Trainer's time to start one worker (once per epoch and worker unless persistent)."""
    worker_boot_ns: float = 0.0
    """On-CPU ns of a new worker before its first fetch (spawn: interpreter, imports, dataset)."""
    latency_ns: float = LATENCY_NS

    def __post_init__(self) -> None:
        if not self.fetch or not self.body_ns:
            raise ValueError(f"{len(self.fetch)} fetches, {len(self.body_ns)} bodies: at least one of each is needed")
        if self.cores <= 0:
            raise ValueError(f"cores is {self.cores}, it must be above 0")
        if not 0 <= self.body_on_cpu_frac <= 1:
            raise ValueError(f"body_on_cpu_frac is {self.body_on_cpu_frac}, it must be 0..1")
        if not isinstance(self.collate_ns, (int, float)) and len(self.collate_ns) != len(self.fetch):
            raise ValueError(f"{len(self.collate_ns)} collates but {len(self.fetch)} fetches")

    def fetch_cpu_ns(self) -> list[float]:
        """On-CPU ns per batch, collate included."""
        if isinstance(self.collate_ns, (int, float)):
            return [on_cpu + self.collate_ns for on_cpu, _ in self.fetch]
        return [on_cpu + collate for (on_cpu, _), collate in zip(self.fetch, self.collate_ns, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of a ``DataLoader`` that decide how fast batches come."""

    num_workers: int
    prefetch_factor: int = 2
    """Per worker, as in torch. Ignored without workers."""
    persistent_workers: bool = False
    pin_memory: bool = False
    in_order: bool = True

    def __post_init__(self) -> None:
        if self.num_workers < 0 or self.prefetch_factor < 1:
            raise ValueError(f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}: below 0 or 1")


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


def predict(measured: Measured, config: Config, *, num_steps: int = 1500, seed: int = 0) -> Prediction:
    """Mean step time of ``config``, from service times measured under any other.

    Args:
        measured: What the batches and the bodies cost.
        config: What to predict.
        num_steps: Steps to simulate.
        seed: Where a replay of more batches than ``num_steps`` begins.

    Returns:
        The mean with a 95 % interval: the spread of the measured values (``_spread_ns``) and the model's own error
        (``MODEL_ERROR_FRAC``), added as independent.
    """
    base = _simulate(measured, config, num_steps, seed)
    spread_ns, events = _spread_ns(measured, config, num_steps, seed)
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


def _spread_ns(measured: Measured, config: Config, num_steps: int, seed: int) -> tuple[float, int]:
    """Half width of the 95 % interval that comes from having measured only so many batches; with the events it took.

    Delete-a-block jackknife: the model is run with one contiguous block of the measurement left out at a time. Blocks
    keep the autocorrelation (H. R. Kunsch, "The jackknife and the bootstrap for general stationary observations",
    Annals of Statistics 17(3), 1989), and a block that holds the only slow batches shows what hangs on them. A
    bootstrap over blocks needs dozens of simulations for as steady a number.
    """
    num = min(NUM_BLOCKS, len(measured.fetch), len(measured.body_ns))
    if num < 2:
        return 0.0, 0
    steps = max(1, num_steps // 3)
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
    steady = _Loop(measured, config, _replay(measured, num_steps, seed), epoch=False)
    steady.run(num_steps)
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
    loop = _Loop(measured, config, _replay(measured, length, seed), epoch=True)
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


class _Worker:
    """One worker: queued tasks, batches held, and its interpreter, which helpers take from the fetch for a while.

    ``fetch_seq`` is the event that will end the fetch's on-CPU part while it runs; ``fetch_left_ns`` what is left of it
    while a helper runs.
    """

    __slots__ = ("busy", "fetch_batch", "fetch_left_ns", "fetch_seq", "helpers", "helping", "num_held", "tasks")

    def __init__(self) -> None:
        self.tasks: deque[int] = deque()
        self.helpers: deque[tuple[float, _Handler, int]] = deque()
        self.busy = self.helping = False
        self.fetch_seq: int | None = None
        self.fetch_batch = 0
        self.fetch_left_ns: float | None = None
        self.num_held = 0


class _Loop:
    """The simulation itself. ``now`` is wall time, ``virtual`` the work that each runnable activity has got so far."""

    def __init__(self, measured: Measured, config: Config, replay: list[int], *, epoch: bool) -> None:
        self.m, self.config, self.epoch = measured, config, epoch
        all_cpu = measured.fetch_cpu_ns()
        self.cpu = [all_cpu[i] for i in replay]
        self.blocked = [measured.fetch[i][1] for i in replay]
        self.bodies = measured.body_ns
        self.workers = [_Worker() for _ in range(config.num_workers)]
        self.owner: dict[int, int] = {}
        self.on_core: list[tuple[float, int, _Handler, int, float]] = []
        self.off_core: list[tuple[float, int, _Handler, int]] = []
        self.now = self.virtual = 0.0
        self.runnable = measured.shared_cpu_cores
        self.num_events = self.num_sent = self.turn = self.wanted = self.num_done = 0
        self.arrived: deque[int] = deque()
        self.to_pin: deque[int] = deque()
        self.pinning = False
        self.cancelled: set[int] = set()
        self.stash: set[int] = set()
        self.trainer_waits = False
        self.next_began_ns = 0.0
        self.begun_ns: list[float] = []
        self.waits_ns: list[float] = []
        self.reorder_ns = self.reorder_since_ns = 0.0
        self.num_limit = 0

    # --- the clock -------------------------------------------------------------------------------------------------

    def compute(self, work_ns: float, then: _Handler, arg: int, threads: float = 1.0) -> None:
        """Put an activity on the cores for ``work_ns`` of its own progress."""
        self.num_events += 1
        self.runnable += threads
        heapq.heappush(self.on_core, (self.virtual + work_ns, self.num_events, then, arg, threads))

    def sleep(self, wall_ns: float, then: _Handler, arg: int) -> None:
        """Let wall time pass without a core."""
        self.num_events += 1
        heapq.heappush(self.off_core, (self.now + wall_ns, self.num_events, then, arg))

    def run(self, num_steps: int) -> None:
        """Play until ``num_steps`` steps are done."""
        ahead = len(self.workers) * self.config.prefetch_factor
        self.num_limit = num_steps if self.epoch else num_steps + ahead
        self.start(ahead)
        on_core, off_core, cores, pop = self.on_core, self.off_core, self.m.cores, heapq.heappop
        while self.num_done < num_steps:
            rate = 1.0 if self.runnable <= cores else cores / self.runnable
            while self.cancelled and on_core and on_core[0][1] in self.cancelled:
                self.cancelled.remove(pop(on_core)[1])
            end = self.now + (on_core[0][0] - self.virtual) / rate if on_core else math.inf
            if off_core and off_core[0][0] <= end:
                wall, _, then, arg = pop(off_core)
                self.virtual += (wall - self.now) * rate
                self.now = wall
            else:
                self.virtual, _, then, arg, threads = pop(on_core)
                self.now = end
                self.runnable -= threads
            then(arg)

    def start(self, ahead: int) -> None:
        """Fill the queues as ``DataLoader.__iter__`` does; a new epoch of new workers begins with starting them."""
        fresh = self.epoch and not self.config.persistent_workers
        if fresh:
            self.now = self.next_began_ns = len(self.workers) * self.m.worker_start_ns
        for _ in range(ahead):
            self.send_index()
        if fresh and self.m.worker_boot_ns > 0:
            self.off_core.clear()
            for k, worker in enumerate(self.workers):
                if worker.tasks:
                    worker.busy = True
                    self.compute(self.m.worker_boot_ns, self.take_task, k)
        self.next_begins(0)

    # --- trainer ---------------------------------------------------------------------------------------------------

    def send_index(self) -> None:
        """Hand the next index to the worker whose turn it is; out of order, to the next one that has room."""
        if self.num_sent >= self.num_limit:
            return
        k, num = self.turn, len(self.workers)
        for _ in range(num):
            k, self.turn = self.turn, (self.turn + 1) % num
            if self.config.in_order or self.workers[k].num_held < self.config.prefetch_factor:
                break
        worker = self.workers[k]
        worker.num_held += 1
        worker.tasks.append(self.num_sent)
        self.owner[self.num_sent] = k
        self.num_sent += 1
        if not worker.busy:
            worker.busy = True
            self.sleep(self.m.latency_ns, self.take_task, k)

    def next_begins(self, _: int) -> None:
        self.next_began_ns = self.reorder_since_ns = self.now
        self.look()

    def look(self) -> None:
        """Inside next(): the stash, then what has arrived, then sleep."""
        if self.wanted in self.stash:
            self.stash.remove(self.wanted)
            self.return_batch(self.wanted)
        elif self.arrived:
            self.receive(0)
        else:
            self.trainer_waits = True

    def receive(self, _: int) -> None:
        batch = self.arrived.popleft()
        if self.config.pin_memory:
            self.got(batch)
        else:
            self.deserialise(batch, self.got)

    def deserialise(self, batch: int, then: _Handler) -> None:
        """Half of the CPU, the worker's part of the round trips, the other half."""
        half_ns = self.m.deserialise_ns / 2
        if self.m.serve_ns <= 0:
            self.compute(self.m.deserialise_ns, then, batch)
            return

        def served(batch: int) -> None:
            self.compute(half_ns, then, batch)

        def asked(batch: int) -> None:
            self.help(self.workers[self.owner[batch]], self.m.serve_ns, served, batch)

        self.compute(half_ns, asked, batch)

    def got(self, batch: int) -> None:
        if self.config.in_order and batch != self.wanted:
            if not self.stash:
                self.reorder_since_ns = self.now
            self.stash.add(batch)
            self.look()
        else:
            self.return_batch(batch)

    def return_batch(self, batch: int) -> None:
        if self.stash or (self.config.in_order and self.arrived):
            self.reorder_ns += self.now - self.reorder_since_ns
        self.wanted += 1
        self.workers[self.owner.pop(batch)].num_held -= 1
        self.send_index()
        self.begun_ns.append(self.next_began_ns)
        self.waits_ns.append(self.now - self.next_began_ns)
        body = self.bodies[self.num_done % len(self.bodies)]
        on_cpu = body * self.m.body_on_cpu_frac
        self.compute(on_cpu, self.body_off_core, self.num_done, self.m.body_threads)

    def body_off_core(self, step: int) -> None:
        body = self.bodies[step % len(self.bodies)]
        self.sleep(body * (1 - self.m.body_on_cpu_frac), self.step_ends, step)

    def step_ends(self, _: int) -> None:
        self.num_done += 1
        self.next_begins(0)

    # --- workers and pin thread ------------------------------------------------------------------------------------

    def take_task(self, k: int) -> None:
        worker = self.workers[k]
        if not worker.tasks:
            worker.busy = False
            return
        worker.busy = True
        batch = worker.tasks.popleft()
        blocked = self.blocked[batch % len(self.blocked)]
        if blocked > 0:
            self.sleep(blocked, self.fetch_on_cpu, batch)
        else:
            self.fetch_on_cpu(batch)

    def fetch_on_cpu(self, batch: int) -> None:
        worker = self.workers[self.owner[batch]]
        worker.fetch_batch, worker.fetch_left_ns = batch, self.cpu[batch % len(self.cpu)]
        if not worker.helping:
            self.resume_fetch(worker)

    def resume_fetch(self, worker: _Worker) -> None:
        if worker.fetch_left_ns is not None:
            self.compute(worker.fetch_left_ns, self.fetched, worker.fetch_batch, self.m.fetch_threads)
            worker.fetch_left_ns, worker.fetch_seq = None, self.num_events

    def fetched(self, batch: int) -> None:
        k = self.owner[batch]
        self.workers[k].fetch_seq = None
        self.help(self.workers[k], self.m.serialise_ns, self.serialised, batch)
        self.take_task(k)

    def help(self, worker: _Worker, work_ns: float, then: _Handler, batch: int) -> None:
        """Queue work for a helper thread of ``worker``; it takes the interpreter from a running fetch."""
        worker.helpers.append((work_ns, then, batch))
        if not worker.helping:
            self.interrupt_fetch(worker)
            self.next_helper(worker)

    def interrupt_fetch(self, worker: _Worker) -> None:
        if worker.fetch_seq is not None:
            end = next(entry for entry in self.on_core if entry[1] == worker.fetch_seq)
            worker.fetch_left_ns = end[0] - self.virtual
            self.cancelled.add(worker.fetch_seq)
            self.runnable -= self.m.fetch_threads
            worker.fetch_seq = None

    def next_helper(self, worker: _Worker) -> None:
        worker.helping = bool(worker.helpers)
        if worker.helping:
            work_ns, _, batch = worker.helpers[0]
            self.compute(work_ns, self.helped, self.owner[batch])
        else:
            self.resume_fetch(worker)

    def helped(self, k: int) -> None:
        worker = self.workers[k]
        _, then, batch = worker.helpers.popleft()
        self.next_helper(worker)
        then(batch)

    def serialised(self, batch: int) -> None:
        if self.config.pin_memory:
            self.to_pin.append(batch)
            self.pin()
        else:
            self.arrive(batch)

    def pin(self) -> None:
        if self.to_pin and not self.pinning:
            self.pinning = True
            self.deserialise(self.to_pin.popleft(), self.pin_copy)

    def pin_copy(self, batch: int) -> None:
        self.compute(self.m.pin_ns, self.pinned, batch)

    def pinned(self, batch: int) -> None:
        self.pinning = False
        self.arrive(batch)
        self.pin()

    def arrive(self, batch: int) -> None:
        self.arrived.append(batch)
        if self.trainer_waits:
            self.trainer_waits = False
            self.sleep(self.m.latency_ns, self.receive, 0)

    # --- results ---------------------------------------------------------------------------------------------------

    def means(self) -> tuple[float, float]:
        """Mean step and wait ns after the pipeline has settled: two fillings, at most a third of all."""
        first = min(len(self.waits_ns) // 3, 2 * len(self.workers) * self.config.prefetch_factor)
        count = len(self.waits_ns) - first
        return (self.now - self.begun_ns[first]) / count, math.fsum(self.waits_ns[first:]) / count

    def reorder_frac(self) -> float:
        """Share of the data wait during which another batch had already been received."""
        total = math.fsum(self.waits_ns)
        return self.reorder_ns / total if total > 0 else 0.0
