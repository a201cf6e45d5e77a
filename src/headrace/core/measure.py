"""One loader's numbers: shares of time, splits of the wait, service times. Facts only; ``causes`` decides. Pure."""

from __future__ import annotations

import bisect
import dataclasses

from ..records import rundir as f
from . import stats
from .attribution import PLACES, Task, TaskIndex, split_wait
from .charge import CHARGED, busy_ns, charge
from .events import Event, Trace
from .hostfacts import HostFacts
from .timeline import LoaderView, Step

Kind = f.EventKind
#: A body this many times the median, and longer by this much, holds a pause (checkpoint, logging), not a step.
PAUSE_FACTOR, PAUSE_NS = 3.0, 2_000_000
#: A fetch this many times the median is a slow batch.
SLOW_FACTOR = 2.5
#: A batch handed to the queue this long before it is asked for has been through the feeder thread.
READY_NS = 1_000_000
#: After a body that mostly slept, the first code to run pays for cold caches and an idle core, wherever it stands: on a
#: 2-core virtual machine 0.7-1.5 ms of next() after 28 ms of sleep came back in the body when cached batches were
#: replayed. That much of the thread's CPU in next() is no stall. A real device's clock needs no such correction.
WAKE_NS, IDLE_BODY_NS = 1_000_000, 5_000_000


@dataclasses.dataclass
class Facts:
    """What was measured of one loader in one process. Times in ns over the whole observed span, unless said."""

    view: LoaderView
    host: HostFacts
    tasks: list[Task]
    total_ns: int = 0
    parts_ns: dict[str, float] = dataclasses.field(default_factory=dict)
    wait_ns: dict[str, float] = dataclasses.field(default_factory=dict)
    #: Steady stall only, with time in a queue charged to what the worker did meanwhile.
    charged_ns: dict[str, float] = dataclasses.field(default_factory=dict)
    steady_stall_frac: float | None = None
    stall_ci: tuple[float, float] | None = None
    epoch_excess_ns: float = 0.0
    #: The awaited fetches' own split: on_cpu, run_queue, blocked; sums to 1; None when nobody awaited a fetch.
    fetch_split: dict[str, float] | None = None
    slow_wait_frac: float = 0.0
    pause_ns: float = 0.0
    gap_ns: float = 0.0
    nested_ns: float = 0.0
    num_pauses: int = 0
    save_ns: float = 0.0
    backward_ns: float = 0.0
    dist_ns: float = 0.0
    copy_ns: float = 0.0
    copy_bytes: int = 0
    num_pageable_copies: int = 0
    num_blocking_copies: int = 0
    sync_ns: float = 0.0
    median_body_ns: float = 0.0
    body_on_cpu_frac: float = 0.0
    body_run_queue_frac: float = 0.0
    has_device_clock: bool = False
    #: Of the steps whose batch was ready, how many found the device run dry: the host is too slow to issue work.
    dry_frac: float = 0.0
    #: What ``next()`` takes when the batch was there long before it was asked for; None without such steps.
    handover_ns: float | None = None
    #: What the pipeline model says of the measured configuration; filled in by ``whatif``.
    predicted_now_ns: float | None = None

    @property
    def num_workers(self) -> int:
        pids = [len(p) for p in self.view.workers.values()]
        told = self.view.info.get("num_workers")
        return int(told) if told is not None else max(pids, default=0)

    @property
    def stall_ns(self) -> float:
        return self.parts_ns.get("stall", 0.0) + self.parts_ns.get("epoch", 0.0)

    def share(self, ns: float) -> float:
        """``ns`` as a share of the loader's whole time."""
        return ns / self.total_ns if self.total_ns else 0.0


def measure(trace: Trace, view: LoaderView, others: list[LoaderView], index: TaskIndex, host: HostFacts) -> Facts:
    """Reduces one loader's steps to ``Facts``.

    Args:
        trace: the process that iterated.
        view: the loader.
        others: the other loaders of the same process.
        index: finds a step's batch.
        host: the outside samples over the loader's span.
    """
    facts = Facts(view, host, index.all)
    facts.total_ns = max(view.end - view.begin, 1)
    facts.has_device_clock = any(step.idle_ns is not None for step in view.steady)
    _own_cpu(facts, index)
    _body_threads(facts)
    _adjust(facts)
    _waits(facts, index)
    _stalls(facts)
    _bodies(facts, trace, others)
    _forgive_queue(facts)
    _close_the_sum(facts)
    return facts


def _own_cpu(facts: Facts, index: TaskIndex) -> None:
    """After a short ``next()`` the agent does not ask for the next one's CPU time; a fetch in the trainer tells it."""
    if facts.num_workers:
        return
    for step in facts.view.steps:
        task = index.of(step)
        if task is not None:
            step.main_on_cpu_ns = max(step.main_on_cpu_ns, min(task.on_cpu_ns, step.wait_ns))


def _adjust(facts: Facts) -> None:
    """Without a device's clock: what the wait would not cost if data were free, and what the body would not."""
    if facts.has_device_clock or facts.host.trainer_on_cpu_frac is None:
        return
    for step in facts.view.steps:
        # After a wait that blocks, the body starts cold as well: both pay, and free data would save one of the two.
        slept = step.wait_ns - step.main_on_cpu_ns
        if facts.body_on_cpu_frac <= 0.5 and step.body_ns > IDLE_BODY_NS and slept < IDLE_BODY_NS:
            step.wake_ns = max(min(step.main_on_cpu_ns, step.wait_ns, WAKE_NS), 0)
        if facts.num_workers:
            step.crowd_ns = int(facts.body_run_queue_frac * step.body_ns)


def _waits(facts: Facts, index: TaskIndex) -> None:
    pin = bool(facts.view.info.get("pin_memory")) and facts.has_device_clock
    whole: dict[str, float] = dict.fromkeys(PLACES, 0.0)
    charged = dict.fromkeys(CHARGED, 0.0)
    split = {"on_cpu": 0.0, "run_queue": 0.0, "blocked": 0.0}
    for step in facts.view.steps:
        task = index.of(step)
        parts = _split_call(step, split) if facts.view.is_call else split_wait(step, task, pin)
        for place, ns in parts.items():
            whole[place] += ns
        if step.first or not step.wait_ns:
            continue
        if facts.view.is_call:
            charged["fetch"] += step.stall_ns
            continue
        charge(charged, parts, step, task, index)
        if task is not None and parts["fetch"]:
            _split_fetch(split, task, parts["fetch"])
    facts.wait_ns, facts.charged_ns = whole, charged
    total = sum(split.values())
    if total <= 0.3 * charged["fetch"]:  # awaited mostly on their way: then all fetches speak for those behind
        for task in facts.tasks:
            _split_fetch(split, task, task.fetch_ns)
        total = sum(split.values())
    facts.fetch_split = {k: v / total for k, v in split.items()} if total else None
    facts.slow_wait_frac = _slow_share(facts, index)
    facts.handover_ns = _handover_ns(facts, index)


def _split_call(step: Step, split: dict[str, float]) -> dict[str, int]:
    """``--data``: the call is the fetch, in the trainer's own thread."""
    split["on_cpu"] += step.main_on_cpu_ns
    split["blocked"] += step.wait_ns - step.main_on_cpu_ns
    return {**dict.fromkeys(PLACES, 0), "fetch": step.wait_ns}


def _handover_ns(facts: Facts, index: TaskIndex) -> float | None:
    waits = []
    for step in facts.view.steady:
        task = index.of(step)
        if task is None or not facts.num_workers or task.put + READY_NS >= step.wait0:
            continue
        # Behind a worker in Python code the batch has not left yet: its sending thread waits for the GIL.
        busy = sum(busy_ns(index.by_worker.get(task.pid, []), task.put, step.wait0))
        if busy < 0.5 * (step.wait0 - task.put):
            waits.append(float(step.wait_ns))
    return stats.median(waits) if len(waits) >= 5 else None


def _split_fetch(split: dict[str, float], task: Task, weight_ns: float) -> None:
    wall = max(task.fetch1 - task.fetch0, 1)
    blocked = min(task.blocked_ns, wall)
    run_queue = min(task.run_queue_ns or 0, wall - blocked)
    split["blocked"] += weight_ns * blocked / wall
    split["run_queue"] += weight_ns * run_queue / wall
    split["on_cpu"] += weight_ns * (wall - blocked - run_queue) / wall


def _slow_share(facts: Facts, index: TaskIndex) -> float:
    """Share of the steady wait that was for batches whose fetch took far longer than the median."""
    if len(facts.tasks) < 8 or not facts.num_workers:
        return 0.0
    limit = SLOW_FACTOR * stats.median([task.fetch1 - task.fetch0 for task in facts.tasks])
    slow = waited = 0
    for step in facts.view.steady:
        task = index.of(step)
        waited += step.wait_ns
        if task is not None and step.wait_ns and _behind_slow(task, step, index, limit):
            slow += step.wait_ns
    return slow / waited if waited else 0.0


def _behind_slow(task: Task, step: Step, index: TaskIndex, limit: float) -> bool:
    if task.fetch1 - task.fetch0 > limit:
        return True
    if task.fetch0 <= step.wait0:
        return False
    # Queued: its worker was still busy with the slow one.
    mine = index.by_worker.get(task.pid, [])
    at = bisect.bisect_left(mine, task.fetch0, key=lambda other: other.fetch0)
    return at > 0 and mine[at - 1].fetch1 - mine[at - 1].fetch0 > limit


def _stalls(facts: Facts) -> None:
    view = facts.view
    steady = view.steady
    stall = float(sum(step.stall_ns for step in steady))
    first = float(sum(step.stall_ns for step in view.steps if step.first))
    around = float(sum(one.iter_ns + one.stop_ns for one in view.passes))
    facts.parts_ns = {"stall": stall, "epoch": first + around}
    time = sum(step.step_ns for step in steady)
    facts.steady_stall_frac = stall / time if time else None
    mean_wait = stall / len(steady) if steady else 0.0
    facts.epoch_excess_ns = max(first + around - mean_wait * len(view.passes), 0.0)
    if len(steady) >= 8:
        interval = stats.ratio_ci([s.stall_ns for s in steady], [s.step_ns for s in steady])
        facts.stall_ci = None if interval is None else (max(interval[0], 0.0), min(interval[1], 1.0))


def _bodies(facts: Facts, trace: Trace, others: list[LoaderView]) -> None:
    view = facts.view
    steps = sorted(view.steps, key=lambda step: step.wait1)
    nested = _nested_spans(view, others)
    inside = _overlaps(steps, nested)
    facts.nested_ns = float(sum(inside))
    facts.parts_ns["other_loader"] = _other_waits(steps, others, nested)
    bodies = [step.body_ns - ns for step, ns in zip(steps, inside, strict=True)]
    facts.median_body_ns = stats.median(bodies) if bodies else 0.0
    limit = max(facts.median_body_ns * PAUSE_FACTOR, facts.median_body_ns + PAUSE_NS)
    pauses = [body - facts.median_body_ns for body in bodies if body > limit]
    facts.pause_ns, facts.num_pauses = float(sum(pauses)), len(pauses)
    facts.gap_ns = _gap_ns(view)
    _spans(facts, trace)
    # Saved in every step, no body is longer than the others.
    facts.pause_ns = max(facts.pause_ns, _saves_inside(steps, trace))
    facts.parts_ns["outside"] = facts.pause_ns + facts.gap_ns + facts.nested_ns


def _gap_ns(view: LoaderView) -> float:
    """Time between the passes."""
    return float(sum(max(b.begin - a.end, 0) for a, b in zip(view.passes, view.passes[1:], strict=False)))


def _saves_inside(steps: list[Step], trace: Trace) -> float:
    """Time in ``torch.save`` within step bodies."""
    return float(sum(_overlaps(steps, [(event.t0, event.t1) for event in trace.of(Kind.SAVE)])))


def _nested_spans(view: LoaderView, others: list[LoaderView]) -> list[tuple[int, int]]:
    """Whole passes of validation loaders that lie inside this loader's passes, merged and in order."""
    spans = sorted((one.begin, one.end) for other in others if other.role == "validation" for one in other.passes)
    merged: list[tuple[int, int]] = []
    for t0, t1 in spans:
        if t0 <= view.begin or t1 >= view.end:
            continue
        if merged and t0 < merged[-1][1]:  # two validation loaders in one zip: their time is lost once
            merged[-1] = (merged[-1][0], max(merged[-1][1], t1))
        else:
            merged.append((t0, t1))
    return merged


def _overlaps(steps: list[Step], spans: list[tuple[int, int]]) -> list[int]:
    """How much of each body (steps in order) lies in the spans (in order, apart), in ns."""
    starts = [step.wait1 for step in steps]
    out = [0] * len(steps)
    for t0, t1 in spans:
        at = max(bisect.bisect_right(starts, t0) - 1, 0)
        while at < len(steps) and starts[at] < t1:
            out[at] += max(min(t1, steps[at].end) - max(t0, starts[at]), 0)
            at += 1
    return out


def _other_waits(steps: list[Step], others: list[LoaderView], nested: list[tuple[int, int]]) -> float:
    starts, spans = [step.wait1 for step in steps], [t0 for t0, _ in nested]
    total = 0
    for other in others:
        for step in other.steps:
            at = bisect.bisect_right(starts, step.wait0) - 1
            if at < 0 or step.wait0 >= steps[at].end:
                continue
            span = bisect.bisect_right(spans, step.wait0) - 1
            if span < 0 or step.wait0 >= nested[span][1]:
                total += min(step.wait1, steps[at].end) - step.wait0
    return float(total)


def _spans(facts: Facts, trace: Trace) -> None:
    t0, t1 = facts.view.begin, facts.view.end

    def within(kind: Kind) -> list[Event]:
        return [event for event in trace.of(kind) if t0 <= event.t0 < t1]

    facts.save_ns = float(sum(e.dur_ns for e in within(Kind.SAVE)))
    facts.backward_ns = float(sum(e.dur_ns for e in within(Kind.BACKWARD)))
    facts.dist_ns = float(sum(e.dur_ns for e in within(Kind.DIST)))
    copies = within(Kind.COPY)
    facts.copy_bytes = sum(e.a for e in copies)
    facts.num_pageable_copies = sum(1 for e in copies if not e.b & f.COPY_PINNED)
    facts.num_blocking_copies = sum(1 for e in copies if not e.b & f.COPY_NON_BLOCKING)
    facts.copy_ns = float(sum(e.dur_ns for e in copies if e.b != f.COPY_PINNED | f.COPY_NON_BLOCKING))
    facts.sync_ns = float(sum(e.dur_ns for e in within(Kind.SYNC)))
    told = [e.d for e in within(Kind.DEVICE) if e.d != f.NONE]
    facts.dry_frac = sum(told) / len(told) if told else 0.0


def _body_threads(facts: Facts) -> None:
    """What the trainer's main thread did in the bodies: on a core, in the run queue, or waiting."""
    host, view = facts.host, facts.view
    bodies = sum(step.body_ns for step in view.steps) + _gap_ns(view)
    waits = sum(step.wait_ns for step in view.steps)
    if host.trainer_on_cpu_frac is None or not bodies:
        return
    in_wait = sum(step.main_on_cpu_ns for step in view.steps)
    facts.body_on_cpu_frac = min(max((host.trainer_on_cpu_frac * facts.total_ns - in_wait) / bodies, 0.0), 1.0)
    queue = (host.trainer_run_queue_frac or 0.0) * facts.total_ns
    if not facts.num_workers:  # the fetches' own share of the queue is known exactly
        queue -= sum(task.run_queue_ns or 0 for task in facts.tasks)
    else:
        queue = _queue_in_bodies(view, queue, bodies, waits)
    facts.body_run_queue_frac = min(max(queue / bodies, 0.0), 1.0)


def _queue_in_bodies(view: LoaderView, queue_ns: float, bodies_ns: float, waits_ns: float) -> float:
    """The trainer's run-queue time less that of ``next()`` and ``iter()``: measured there, or else shared out."""
    told = [step for step in view.steps if step.queued_ns is not None]
    begun = [one for one in view.passes if one.queued_ns is not None]
    left = queue_ns - sum(step.queued_ns or 0 for step in told) - sum(one.queued_ns or 0 for one in begun)
    unseen = waits_ns - sum(step.wait_ns for step in told)
    unseen += sum(one.iter_ns for one in view.passes if one.queued_ns is None)
    return max(left, 0.0) * bodies_ns / max(bodies_ns + unseen, 1)


def _forgive_queue(facts: Facts) -> None:
    """A body that is long because its thread had no core is no pause: that part goes back to the step."""
    bodies = sum(step.body_ns for step in facts.view.steps)
    forgiven = min(facts.body_run_queue_frac * bodies, facts.pause_ns)
    facts.pause_ns -= forgiven
    facts.parts_ns["outside"] -= forgiven


def _close_the_sum(facts: Facts) -> None:
    parts = facts.parts_ns
    for name in ("copy", "sync", "launch", "rank"):
        parts.setdefault(name, 0.0)
    used = sum(parts.values())
    if used > facts.total_ns:  # overlapping passes of one site (threads): keep the proportions
        for name in parts:
            parts[name] *= facts.total_ns / used
        used = facts.total_ns
    parts["step"] = facts.total_ns - used
