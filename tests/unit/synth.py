"""Synthetic runs: a DataLoader simulated in pure Python, and the records that agent and sampler would have written.

    trainer = Trainer(pid=100)
    loader = trainer.loader(num_workers=2, fetch=Service(on_cpu_ns=20 * MS))
    trainer.train(loader, epochs=2, body_ns=10 * MS)
    observed = observe([trainer], Machine(num_cpus=8, num_allowed_cpus=8))

One clock (``Trainer.now``), one thread of control per process. Workers take their index lists in order; batch j belongs
to worker j mod n, and a new index leaves when a batch is returned, as in torch. What a core is worth is not simulated:
a ``Service`` says how long a fetch was on a core, in the run queue and blocked, and the samples are made from that.
"""

from __future__ import annotations

import bisect
import itertools
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.analyse import Observed
from headrace.core.events import Event, EventFile, Trace
from headrace.records import rundir as f
from headrace.records.rundir import CgroupSample, HostSample, Machine, ProcSample

US, MS, S = 1_000, 1_000_000, 1_000_000_000
Kind = f.EventKind
#: Where the clock of every synthetic run begins: not zero, as no monotonic clock of a running machine is.
ZERO_NS = 1_000 * S
PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class Service:
    """One fetch without collate: ns on a core (of ``threads`` threads), in the run queue, and blocked."""

    on_cpu_ns: int = 0
    run_queue_ns: int = 0
    blocked_ns: int = 0
    threads: float = 1.0

    @property
    def wall_ns(self) -> int:
        return self.on_cpu_ns + self.run_queue_ns + self.blocked_ns


Fetch = Service | Callable[[int], Service]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A loader: torch's arguments and what each of its stages costs per batch."""

    site: str = "train.py:10"
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = False
    in_order: bool = True
    batches: int = 40
    batch_size: int | None = 32
    fetch: Fetch = Service(on_cpu_ns=5 * MS)
    collate_ns: int = 0
    #: Worker's helper thread, between its put and the batch's arrival; and the trainer's part, inside next().
    serialise_ns: int = 50 * US
    deserialise_ns: int = 50 * US
    pin_ns: int | None = None
    num_bytes: int = 1 << 20
    num_tensors: int = 2
    #: At iter(), in the trainer: per worker. In the worker, before its first batch.
    worker_start_ns: int = 2 * MS
    worker_boot_ns: int = 0
    minor_faults_per_batch: int = 0

    def service(self, number: int) -> Service:
        return self.fetch(number) if callable(self.fetch) else self.fetch


@dataclass
class Process:
    """What one process leaves: meta lines, events, and spans of work for the sampler."""

    pid: int
    ppid: int
    comm: str
    rank: int | None = None
    born: int = ZERO_NS
    died: int | None = None
    meta: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    #: (t0, t1, on-CPU ns, run-queue ns, on-CPU ns of other threads, minor faults)
    spans: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)

    @property
    def start(self) -> dict[str, Any]:
        """Its first meta line."""
        return {
            "k": "start", "pid": self.pid, "ppid": self.ppid, "t_ns": self.born, "forked": self.ppid != 1,
            "rank": self.rank, "python": "3.12.3", "cwd": "/home/u", "argv": ["python", "train.py"],
        }  # fmt: skip

    def note(self, kind: Kind, t0: int, t1: int, *fields: int) -> None:
        a, b, c, d, e = (*fields, 0, 0, 0, 0, 0)[:5]
        self.events.append(Event(int(kind), t0, t1, a, b, c, d, e))

    def trace(self) -> Trace:
        file = EventFile(self.pid, self.born, 0, self.events, 0)
        return Trace(self.start, [self.start, *self.meta], file)

    def write(self, rundir: Path) -> None:
        """Its two files, as the agent leaves them."""
        tag = rundir / f"{self.pid}-{self.born}"
        lines = [json.dumps(line) for line in (self.start, *self.meta)]
        tag.with_suffix(".meta").write_text("\n".join(lines) + "\n")
        if self.events:
            tag.with_suffix(".ev").write_bytes(encode(self.events, self.pid, self.born))

    def totals(self, at: int) -> list[int]:
        """The four counters at one moment: on-CPU, run queue, others' on-CPU, minor faults."""
        out = [0.0, 0.0, 0.0, 0.0]
        for t0, t1, *counts in self._sums(at):
            part = 1.0 if t1 <= at else (at - t0) / (t1 - t0)
            for i, count in enumerate(counts):
                out[i] += count * part
        return [round(value) for value in out]

    def _sums(self, at: int) -> list[tuple[int, ...]]:
        done = bisect.bisect_right(self._ends(), at)
        last = self.spans[done : done + 1]
        whole = (0, at, *self._running[done])
        return [whole, *(span for span in last if span[0] < at)]

    def _ends(self) -> list[int]:
        if not hasattr(self, "_running"):
            self.spans.sort()
            self._end_times = [span[1] for span in self.spans]
            self._running = [(0, 0, 0, 0)]
            for span in self.spans:
                self._running.append(tuple(a + b for a, b in zip(self._running[-1], span[2:], strict=True)))
        return self._end_times


def encode(events: Sequence[Event], pid: int = 1, start_ns: int = 0, hook_ns: int = 0) -> bytes:
    """The bytes of a ``.ev`` file, ring included, as the agent's writer lays them out."""
    kept: list[Event] = list(events[: f.HEAD_EVENTS])
    late = events[f.HEAD_EVENTS :]
    ring: list[Event] = list(late[: f.RING_EVENTS])
    for i, event in enumerate(late[f.RING_EVENTS :]):
        ring[i % f.RING_EVENTS] = event
    head = struct.pack("<6Q", f.EVENT_MAGIC, len(events), pid, start_ns, hook_ns, 0).ljust(f.EVENT_HEADER_BYTES, b"\0")
    pack = struct.Struct("<8Q").pack
    return head + b"".join([pack(*event) for event in itertools.chain(kept, ring)])


class Trainer(Process):
    """The process that iterates. Its methods advance ``now``; nothing else does."""

    def __init__(
        self, pid: int = 100, rank: int | None = None, now: int = ZERO_NS, body_on_cpu_frac: float = 0.0
    ) -> None:
        super().__init__(pid=pid, ppid=1, comm="python", rank=rank, born=now)
        self.now = now + 100 * MS
        self.body_on_cpu_frac = body_on_cpu_frac
        self.workers: list[Process] = []
        self.ids = itertools.count(1)
        self.pids = itertools.count(pid + 1)
        self.meta.append({"k": "torch", "version": "2.14.1", "cuda": None})

    def loader(self, **arguments: Any) -> Loader:
        return Loader(self, Spec(**arguments))

    def spend(self, ns: int, on_cpu_ns: int | None = None, run_queue_ns: int = 0, others_ns: int = 0) -> None:
        """Lets ``ns`` pass, of which ``on_cpu_ns`` (default: all) on a core."""
        if ns > 0:
            self.spans.append(
                (self.now, self.now + ns, ns if on_cpu_ns is None else on_cpu_ns, run_queue_ns, others_ns, 0)
            )
        self.now += ns

    def body(self, ns: int, backward: bool = True, backward_ns: int | None = None, run_queue_ns: int = 0) -> None:
        """A step's body of ``ns``: with ``backward`` its last part is backward (default: half) and the optimizer."""
        back = min(ns // 2 if backward_ns is None else backward_ns, ns)
        before = max(ns - back - 1 * US, 0)
        start = self.now
        self.spans.append((start, start + max(ns, 1), int(self.body_on_cpu_frac * ns), run_queue_ns, 0, 0))
        if backward:
            self.note(Kind.BACKWARD, start + before, start + before + back)
            self.note(Kind.OPTIMIZER, start + before + back, start + ns)
        self.now += ns

    def save(self, ns: int) -> None:
        self.note(Kind.SAVE, self.now, self.now + ns)
        self.spend(ns, 0)

    def train(self, loader: Loader, epochs: int = 1, body_ns: int = 10 * MS, **body: Any) -> None:
        """The plain loop."""
        for _ in range(epochs):
            for _ in loader:
                self.body(body_ns, **body)

    def processes(self) -> list[Process]:
        return [self, *self.workers]

    def traces(self) -> list[Trace]:
        return [process.trace() for process in self.processes()]


class Loader:
    """A DataLoader of one trainer. Iterating it is ``iter()`` and then ``next()`` until the epoch ends."""

    def __init__(self, trainer: Trainer, spec: Spec) -> None:
        self.trainer, self.spec = trainer, spec
        self.id = next(trainer.ids)
        self.kept: _Iterator | None = None
        line = {
                "k": "loader", "loader": self.id, "site": spec.site, "dataset": "__main__.Data", "iterable": False,
                "batch_size": spec.batch_size, "num_workers": spec.num_workers, "pin_memory": spec.pin_ns is not None,
                "prefetch_factor": spec.prefetch_factor if spec.num_workers else None,
                "persistent_workers": spec.persistent_workers, "in_order": spec.in_order, "start_method": "fork",
                "length": spec.batches, "collate": "default_collate", "guard": True, "pickles": True,
        }  # fmt: skip
        trainer.meta.append(line)

    def __iter__(self) -> _Iterator:
        trainer, t0 = self.trainer, self.trainer.now
        iterator = self.kept
        if iterator is None:
            iterator = _Iterator(self)
            if self.spec.persistent_workers and self.spec.num_workers:
                self.kept = iterator
        iterator.begin()
        trainer.spend(10 * US)
        trainer.note(Kind.EPOCH, t0, trainer.now, iterator.id, self.id, int(iterator.epochs > 1), iterator.epochs - 1)
        return iterator


class _Iterator:
    def __init__(self, loader: Loader) -> None:
        self.loader, self.trainer, self.spec = loader, loader.trainer, loader.spec
        self.id = next(self.trainer.ids)
        self.epochs = 0
        self.free: list[int] = []
        self.workers: list[Process] = []
        self.pin_free = 0
        for k in range(self.spec.num_workers):
            self._start_worker(k)
        pids = [worker.pid for worker in self.workers]
        self.queue = 7_000 + self.id if pids else 0
        self.trainer.meta.append(
            {"k": "iter", "iter": self.id, "loader": loader.id, "workers": pids, "queue": self.queue}
        )

    def _start_worker(self, k: int) -> None:
        trainer = self.trainer
        trainer.spend(self.spec.worker_start_ns)
        worker = Process(next(trainer.pids), trainer.pid, "pt_data_worker", trainer.rank, trainer.now)
        worker.meta.append({"k": "worker", "worker": k, "t_ns": trainer.now})
        trainer.workers.append(worker)
        self.workers.append(worker)
        self.free.append(trainer.now + self.spec.worker_boot_ns)
        if self.spec.worker_boot_ns:
            worker.spans.append(
                (trainer.now, trainer.now + self.spec.worker_boot_ns, self.spec.worker_boot_ns, 0, 0, 0)
            )

    def begin(self) -> None:
        self.epochs += 1
        self.sent = self.received = self.delivered = 0
        self.arriving: list[tuple[int, int]] = []
        self.stash: set[int] = set()
        for _ in range(self.spec.num_workers * self.spec.prefetch_factor):
            self._send()

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> int:
        """One batch's number. The trainer's clock moves on by the wait."""
        trainer, t0 = self.trainer, self.trainer.now
        if self.delivered == self.spec.batches:
            self._end(t0)
            raise StopIteration
        on_cpu = self._receive() if self.workers else self._fetch_here()
        trainer.spend(5 * US)
        idx = self.delivered if self.workers else f.NONE
        trainer.note(Kind.NEXT, t0, trainer.now, self.id, self.delivered, 0, on_cpu + 5 * US, idx)
        self.delivered += 1
        if self.workers:
            self._send()
        return self.delivered - 1

    def _end(self, t0: int) -> None:
        trainer = self.trainer
        trainer.spend((200 * US if self.workers and not self.spec.persistent_workers else 0) + 5 * US)
        trainer.note(Kind.NEXT, t0, trainer.now, self.id, self.delivered, f.NEXT_STOP, 5 * US, f.NONE)
        if not self.spec.persistent_workers:
            for worker in self.workers:
                worker.died = trainer.now

    def _fetch_here(self) -> int:
        trainer, spec = self.trainer, self.spec
        trainer.spend(3 * US)
        service = spec.service(self.delivered)
        self._fetched(trainer, trainer.now, service, 0, f.NONE)
        trainer.now += service.wall_ns + spec.collate_ns
        return 3 * US + service.on_cpu_ns + spec.collate_ns

    def _fetched(self, process: Process, t0: int, service: Service, worker_1: int, idx: int) -> int:
        spec = self.spec
        t1 = t0 + service.wall_ns + spec.collate_ns
        on_cpu = service.on_cpu_ns + spec.collate_ns
        others = round(service.on_cpu_ns * (service.threads - 1))
        process.note(Kind.FETCH, t0, t1, worker_1, idx, spec.collate_ns, on_cpu, service.run_queue_ns)
        num = spec.batch_size or 1
        process.note(Kind.SAMPLE, t0, t0 + service.wall_ns // num, worker_1, idx, 0, num, on_cpu + others)
        process.spans.append((t0, max(t1, t0 + 1), on_cpu, service.run_queue_ns, others, spec.minor_faults_per_batch))
        return t1

    def _send(self) -> None:
        if self.sent >= self.spec.batches:
            return
        spec, j, k = self.spec, self.sent, self.sent % self.spec.num_workers
        self.sent += 1
        worker = self.workers[k]
        got = max(self.trainer.now + 30 * US, self.free[k])
        done = self._fetched(worker, got + 5 * US, spec.service(j), k + 1, j)
        put = done + 5 * US
        worker.note(Kind.TASK, got, put, k + 1, j, self.epochs - 1, spec.num_bytes, spec.num_tensors)
        worker.spans.append((put, put + max(spec.serialise_ns, 1), 0, 0, spec.serialise_ns, 0))
        self.free[k] = put
        bisect.insort(self.arriving, (self._through_pin(put + spec.serialise_ns, j), j))

    def _through_pin(self, arrived: int, j: int) -> int:
        # Batches are pinned in the order they were sent here, which is that of arrival for equal services.
        if self.spec.pin_ns is None:
            return arrived
        t0 = max(arrived, self.pin_free)
        self.pin_free = t0 + self.spec.pin_ns
        self.trainer.note(Kind.PIN, t0, self.pin_free, self.queue, j)
        return self.pin_free

    def _receive(self) -> int:
        trainer, wanted, on_cpu = self.trainer, self.delivered, 0
        while wanted not in self.stash:
            arrival, j = self.arriving.pop(0)
            t0 = trainer.now
            trainer.now = max(t0, arrival)
            trainer.spend(self.spec.deserialise_ns)
            on_cpu += self.spec.deserialise_ns
            trainer.note(Kind.RECV, t0, trainer.now, self.id, j, self.epochs - 1)
            self.stash.add(j)
        self.stash.remove(wanted)
        return on_cpu


def machine(cores: int = 8, allowed: int | None = None, **more: Any) -> Machine:
    """A machine of ``cores`` cores, of which the program may use ``allowed``."""
    return Machine(num_cpus=cores, num_allowed_cpus=allowed or cores, memory_bytes=64 << 30, **more)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What the sampler sees besides the processes' own work."""

    period_ns: int = 250 * MS
    throttled_frac: float = 0.0
    narrow_cpus: int | None = None
    #: Private dirty pages that each minor fault leaves behind.
    fault_kept_frac: float = 0.0
    psi_memory_frac: float = 0.0
    swap_bytes: int | None = None
    memory_bytes: int | None = None
    memory_limit_hits_per_s: float = 0.0
    others_cores: float = 0.0


def observe(
    trainers: Sequence[Trainer], host: Machine | None = None, sampling: Sampling | None = None, warmup: int = 0
) -> Observed:
    """What ``gather`` would have decoded."""
    host = host or machine()
    traces = [trace for trainer in trainers for trace in trainer.traces()]
    return Observed(traces, samples(trainers, host, sampling or Sampling()), host, ZERO_NS, warmup)


def samples(trainers: Sequence[Trainer], host: Machine, how: Sampling) -> list[HostSample]:
    """The lines of ``host.jsonl`` after the first."""
    processes = [process for trainer in trainers for process in trainer.processes()]
    end = max(trainer.now for trainer in trainers)
    period = max(min(how.period_ns, (end - ZERO_NS) // 40), 1 * MS)
    return [_sample(t, processes, host, how) for t in range(ZERO_NS, end + period, period)]


def _sample(t: int, processes: Iterable[Process], host: Machine, how: Sampling) -> HostSample:
    busy, procs = 0, []
    for process in processes:
        on_cpu, run_queue, others, faults = process.totals(t)
        busy += on_cpu + others
        if process.born <= t and (process.died is None or t <= process.died):
            procs.append(_proc(process, t, how, on_cpu, run_queue, others, faults))
    elapsed = t - ZERO_NS
    busy += int(how.others_cores * elapsed)
    allowed = (host.num_allowed_cpus or 1) * elapsed
    hits = int(how.memory_limit_hits_per_s * elapsed / 1e9)
    cgroup = CgroupSample(
        usage_ns=busy,
        throttled_ns=int(how.throttled_frac * elapsed),
        memory_bytes=how.memory_bytes,
        memory_limit_hits=hits,
    )
    return HostSample(
        t_ns=t, procs=procs, cpu_busy_ns=min(busy, allowed), cpu_idle_ns=max(allowed - busy, 0), machine_busy_ns=busy,
        psi_memory_ns=int(how.psi_memory_frac * elapsed), cgroup=cgroup,
    )  # fmt: skip


def _proc(process: Process, t: int, how: Sampling, on_cpu: int, run_queue: int, others: int, faults: int) -> ProcSample:
    system = faults * 1_000
    return ProcSample(
        pid=process.pid, ppid=process.ppid, comm=process.comm, state="R", num_threads=1 + 3 * (others > 0),
        on_cpu_ns=on_cpu, run_queue_ns=run_queue, others_on_cpu_ns=others, others_run_queue_ns=0,
        user_ns=max(on_cpu + others - system, 0), system_ns=min(system, on_cpu + others), minor_faults=faults,
        major_faults=0, num_allowed_cpus=how.narrow_cpus,
        private_dirty_bytes=int(how.fault_kept_frac * faults * 4096),
        swap_bytes=how.swap_bytes,
    )  # fmt: skip


def write_rundir(
    rundir: Path, observed_from: Sequence[Trainer], host: Machine | None = None, how: Sampling | None = None
) -> Path:
    """A whole run directory, as it lies there after the program has ended."""
    host, end = host or machine(), max(trainer.now for trainer in observed_from)
    header = f.RunHeader(
        command=["train.py"], headrace_version="0", headrace_pid=1, started_mono_ns=ZERO_NS, started_unix_ns=0
    )
    (rundir / "run.json").write_bytes(msgspec.json.encode(header))
    (rundir / "end.json").write_bytes(msgspec.json.encode(f.RunEnd(ended="exit", exit_code=0, ended_mono_ns=end)))
    lines = [host, *samples(observed_from, host, how or Sampling())]
    (rundir / "host.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    for trainer in observed_from:
        for process in trainer.processes():
            process.write(rundir)
    return rundir
