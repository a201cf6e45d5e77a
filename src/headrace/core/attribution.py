"""Where the awaited batch was: every slice of a data wait is charged to the stage its own batch was in. Pure.

Averages over workers mislead when one sample is slow; the trainer waits for one batch at a time, so that batch's own
six timestamps decide (Lotus, IISWC 2024, measures the same two times per batch; facts/diagnosis 1.3).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque

from ..records import rundir as f
from .events import Event, Trace
from .timeline import LoaderView, Step

Kind = f.EventKind
_NEVER = 1 << 65
PLACES = ("queued", "fetch", "collate", "transport", "pin", "reorder", "unseen")


@dataclasses.dataclass(slots=True)
class Task:
    """One batch in its worker (or in the trainer, with num_workers=0). Times in monotonic ns; splits in ns."""

    pid: int
    resumes: int
    idx: int
    got: int
    fetch0: int
    fetch1: int
    put: int
    collate_ns: int
    on_cpu_ns: int
    run_queue_ns: int | None
    process_cpu_ns: int = 0
    num_samples: int = 0
    num_bytes: int | None = None
    num_tensors: int | None = None
    slowest_ns: int = 0
    slowest_index: int | None = None
    recv0: int | None = None
    recv1: int | None = None
    pin0: int | None = None
    pin1: int | None = None

    @property
    def fetch_ns(self) -> int:
        """Dataset code only, collate excluded."""
        return max(self.fetch1 - self.fetch0 - self.collate_ns, 0)

    @property
    def collate0(self) -> int:
        return self.fetch1 - self.collate_ns

    @property
    def blocked_ns(self) -> int:
        """Neither on a core nor ready, and no other thread of the worker at work for it either."""
        wall = self.fetch1 - self.fetch0
        # In the trainer other threads have work of their own; a worker's are there for its fetches.
        others = max(self.process_cpu_ns - self.on_cpu_ns, 0) if self.idx != f.NONE else 0
        return max(wall - self.on_cpu_ns - (self.run_queue_ns or 0) - others, 0)


def worker_tasks(trace: Trace) -> list[Task]:
    """The batches that one process fetched, in order."""
    handed = _queues(trace.of(Kind.TASK))
    samples = _queues(trace.of(Kind.SAMPLE))
    tasks = []
    for fetch in trace.of(Kind.FETCH):
        key = (fetch.a, fetch.b)
        out = _take(handed.get(key), fetch.t1) if fetch.a else None
        sample = _take(samples.get(key), fetch.t0)
        tasks.append(_task(trace.pid, fetch, out, sample))
    return tasks


def _queues(events: list[Event]) -> dict[tuple[int, int], deque[Event]]:
    queues: dict[tuple[int, int], deque[Event]] = {}
    for event in events:
        queues.setdefault((event.a, event.b), deque()).append(event)
    return queues


def _take(queue: deque[Event] | None, not_before: int) -> Event | None:
    # The same batch number comes again in each epoch: what was written for this fetch ends after it.
    while queue:
        event = queue.popleft()
        if event.t1 >= not_before:
            return event
    return None


def _task(pid: int, fetch: Event, out: Event | None, sample: Event | None) -> Task:
    return Task(
        pid=pid,
        resumes=out.c if out else 0,
        idx=fetch.b,
        got=out.t0 if out else fetch.t0,
        fetch0=fetch.t0,
        fetch1=fetch.t1,
        put=out.t1 if out else fetch.t1,
        collate_ns=min(fetch.c, fetch.dur_ns),
        on_cpu_ns=min(fetch.d, fetch.dur_ns),
        run_queue_ns=None if fetch.e == f.NONE else fetch.e,
        process_cpu_ns=sample.e if sample and sample.e != f.NONE else min(fetch.d, fetch.dur_ns),
        num_samples=sample.d if sample else 0,
        num_bytes=out.d if out and out.d != f.NONE else None,
        num_tensors=out.e if out and out.e != f.NONE else None,
        slowest_ns=sample.dur_ns if sample else 0,
        slowest_index=None if sample is None or sample.c == f.NONE else sample.c,
    )


def _within(tasks: list[Task], view: LoaderView) -> list[Task]:
    """Those of a trainer's own fetches that this loader's ``next()`` called: other loaders have theirs."""
    waits = sorted((step.wait0, step.wait1) for step in view.steps)
    starts = [t0 for t0, _ in waits]

    def called(task: Task) -> bool:
        at = bisect.bisect_right(starts, task.fetch0) - 1
        return at >= 0 and task.fetch1 <= waits[at][1]

    return [task for task in tasks if called(task)]


class TaskIndex:
    """Finds the task of a step: by worker, resume count and batch number, or by time in the trainer itself."""

    def __init__(self, trainer: Trace, workers: dict[int, Trace], view: LoaderView) -> None:
        self.by_worker: dict[int, list[Task]] = {}
        self.by_key: dict[tuple[int, int, int], Task] = {}
        for iter_id, pids in view.workers.items():
            for pid in pids:
                self._add_worker(iter_id, pid, workers.get(pid))
        alone = any(not pids for pids in view.workers.values())
        self.own = _within(worker_tasks(trainer), view) if alone else []
        self.own_starts = [task.fetch0 for task in self.own]
        self._add_receipts(trainer, view)

    def _add_worker(self, iter_id: int, pid: int, trace: Trace | None) -> None:
        if trace is None:
            return
        tasks = self.by_worker[pid] = worker_tasks(trace)
        for task in tasks:
            self.by_key[iter_id, task.resumes, task.idx] = task

    def _add_receipts(self, trainer: Trace, view: LoaderView) -> None:
        for event in trainer.of(Kind.RECV):
            task = self.by_key.get((event.a, event.c, event.b))
            if task is not None and task.recv1 is None:
                task.recv0, task.recv1 = event.t0, event.t1
        queues = {queue: iter_id for iter_id, queue in view.queues.items() if queue}
        pins = trainer.of(Kind.PIN)
        waiting = self._by_batch() if pins else {}
        for event in pins:
            # The same batch number comes again in each epoch, in the order of epochs.
            rest = waiting.get((queues.get(event.a, -1), event.b))
            if rest and rest[0].put <= event.t1:
                task = rest.popleft()
                task.pin0, task.pin1 = event.t0, event.t1

    def _by_batch(self) -> dict[tuple[int, int], deque[Task]]:
        waiting: dict[tuple[int, int], deque[Task]] = {}
        for (iter_id, _, idx), task in sorted(self.by_key.items()):
            waiting.setdefault((iter_id, idx), deque()).append(task)
        return waiting

    def of(self, step: Step) -> Task | None:
        task = self.by_key.get((step.iter_id, step.resumes, step.task)) if self.by_key else None
        if task is not None or not self.own:
            return task
        at = bisect.bisect_left(self.own_starts, step.wait0)
        if at < len(self.own) and self.own[at].fetch1 <= step.wait1:
            return self.own[at]
        return None

    @property
    def all(self) -> list[Task]:
        return [task for tasks in self.by_worker.values() for task in tasks] or self.own


def split_wait(step: Step, task: Task | None, pin: bool) -> dict[str, int]:
    """Splits one data wait by where its batch was; the parts sum to ``step.wait_ns``.

    Args:
        step: the step whose wait is split.
        task: its batch, None when the worker's side was not recorded.
        pin: whether the loader pins (the last stage in the trainer itself, with num_workers=0).
    """
    parts = dict.fromkeys(PLACES, 0)
    if task is None:
        parts["unseen"] = step.wait_ns
        return parts
    # One cursor, so that the parts sum to the wait whatever order the clocks of several processes give.
    at = step.wait0
    for place, end in _stages(task, pin):
        until = min(end, step.wait1)
        if until > at:
            parts[place] += until - at
            at = until
    return parts


def _stages(task: Task, pin: bool) -> list[tuple[str, int]]:
    """(place, when the batch left it), in the order of a batch's way; the last has no end."""
    stages = [("queued", task.fetch0), ("fetch", task.collate0), ("collate", task.fetch1)]
    if task.recv1 is None:
        return [*stages, ("pin" if pin else "transport", _NEVER)]
    last = task.fetch1
    if task.pin0 is not None and task.pin1 is not None:
        stages += [("transport", task.pin0), ("pin", task.pin1)]
        last = task.pin1
    # In the queue already, while the trainer still takes in batches that it does not await.
    ready = max(task.put, last)
    if task.recv0 is not None and task.recv0 > ready:
        stages += [("transport", ready), ("reorder", task.recv0)]
    return [*stages, ("transport", _NEVER)]


def queued_behind(step: Step, task: Task, tasks: list[Task]) -> dict[str, int]:
    """What the worker of a queued batch did meanwhile: ``fetch``, ``collate`` of earlier batches, else ``transport``.

    Args:
        step: the step whose batch was queued.
        task: that batch.
        tasks: all batches of its worker, in order.
    """
    t0, t1 = step.wait0, min(task.fetch0, step.wait1)
    parts = {"fetch": 0, "collate": 0, "transport": 0}
    at = bisect.bisect_left(tasks, task.fetch0, key=lambda other: other.fetch0)
    while at > 0 and tasks[at - 1].fetch1 > t0:
        at -= 1
        other = tasks[at]
        parts["fetch"] += max(min(other.collate0, t1) - max(other.fetch0, t0), 0)
        parts["collate"] += max(min(other.fetch1, t1) - max(other.collate0, t0), 0)
    parts["transport"] = max(t1 - t0 - parts["fetch"] - parts["collate"], 0)
    return parts
