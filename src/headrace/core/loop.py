"""A training loop over torch's ``DataLoader`` as a discrete-event simulation, fed with measured service times.

Who runs where:

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
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: From an index put into a worker's queue to its fetch, and from a batch put by a worker to the trainer awake: a
#: thread, a pipe and a scheduler in between. Assumed, not measured; it matters only where nothing is prefetched.
LATENCY_NS = 150_000
#: Share of a worker's CPU beside its fetch that falls into the trainer's next(): torch's ``file_descriptor`` strategy
#: passes each tensor's descriptor in a round trip. Measured with 1 to 64 tensors on a busy machine: 0.3 to 0.5.
SERVE_SHARE_FRAC = 0.45

_Handler = Callable[[int], None]


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


def num_settle(config: Config) -> int:
    """Steps until the first filling of the pipeline is forgotten."""
    return 2 * config.num_workers * config.prefetch_factor


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


class Loop:
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
        """Mean step and wait ns of settled steps; over whole rounds of the replay, so that rare batches count right."""
        settled = self.num_done - num_settle(self.config)
        first = self.num_done - (settled - settled % len(self.cpu) or settled)
        waits_ns = self.waits_ns[first : self.num_done]  # the step after the last may have got its batch already
        return (self.now - self.begun_ns[first]) / len(waits_ns), math.fsum(waits_ns) / len(waits_ns)

    def reorder_frac(self) -> float:
        """Share of the data wait during which another batch had already been received."""
        total = math.fsum(self.waits_ns)
        return self.reorder_ns / total if total > 0 else 0.0
