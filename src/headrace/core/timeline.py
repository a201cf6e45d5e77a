"""From events to steps: which loaders a process iterated, pass by pass, and what each step consisted of. Pure.

A *pass* is one epoch of one iterator: ``iter()``, the deliveries, and the ``next()`` that raised StopIteration. A step
is a wait followed by its body: ``[next_i.t0, next_i+1.t0)``. The first step of a pass is an epoch start, not steady.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable
from typing import Any

from ..records import rundir as f
from .events import Event, Trace

Kind = f.EventKind

#: The agent asks for the CPU time of a ``next()`` only after one that took this long (see its ``loaders.py``): where it
#: did not, it is assumed to be no more, and whatever the call took beyond to be waiting.
_SHORT_NS = 50_000


@dataclasses.dataclass(slots=True)
class Step:
    """One step. ``wait0..wait1`` is the data wait, ``wait1..end`` the body; ``first`` at a pass's start. All in ns."""

    iter_id: int
    resumes: int
    task: int
    wait0: int
    wait1: int
    end: int
    first: bool
    main_on_cpu_ns: int
    delivered: int
    idle_ns: int | None = None
    #: Part of the wait in which the trainer was ready but had no core; None where that was not asked.
    queued_ns: int | None = None
    #: Part of the wait that the step would pay itself if data were free (see ``measure.WAKE_NS``).
    wake_ns: int = 0
    #: Part of the body in which the trainer stood in the run queue, behind its own workers.
    crowd_ns: int = 0

    @property
    def wait_ns(self) -> int:
        return self.wait1 - self.wait0

    @property
    def body_ns(self) -> int:
        return self.end - self.wait1

    @property
    def step_ns(self) -> int:
        return self.end - self.wait0

    @property
    def stall_ns(self) -> int:
        """What the device idled for data.

        Without a device's clock: the data wait, less what waking up costs, and what the workers took of the body.
        """
        if self.idle_ns is not None:
            return min(self.idle_ns, self.wait_ns)
        return self.wait_ns - self.wake_ns + self.crowd_ns


@dataclasses.dataclass(slots=True)
class Pass:
    """One epoch of one iterator: ``begin..end``; ``epoch_ns`` is iter() plus the StopIteration that ended it."""

    iter_id: int
    begin: int
    end: int
    iter_ns: int
    stop_ns: int
    steps: list[Step]
    #: Part of ``iter_ns`` in which the trainer was ready but had no core; None where that was not asked.
    queued_ns: int | None = None


@dataclasses.dataclass
class LoaderView:
    """All passes over the loaders made at one site of one process."""

    site: str
    info: dict[str, Any]
    iter_ids: set[int]
    workers: dict[int, list[int]]  # iterator -> worker pids
    queues: dict[int, int]  # iterator -> id of its result queue
    passes: list[Pass] = dataclasses.field(default_factory=list)
    role: str = "unknown"
    is_call: bool = False

    def absorb(self, later: LoaderView) -> None:
        """Takes over the passes of a loader that came after this one's."""
        self.info = later.info
        self.iter_ids |= later.iter_ids
        self.workers |= later.workers
        self.queues |= later.queues
        self.passes += later.passes

    @property
    def steps(self) -> list[Step]:
        return [step for one in self.passes for step in one.steps]

    @property
    def steady(self) -> list[Step]:
        return [step for step in self.steps if not step.first]

    @property
    def begin(self) -> int:
        return self.passes[0].begin

    @property
    def end(self) -> int:
        return self.passes[-1].end

    @property
    def wait_ns(self) -> int:
        """All time the trainer gave to this loader, epoch starts and ends included."""
        return sum(s.wait_ns for s in self.steps) + sum(p.iter_ns + p.stop_ns for p in self.passes)


def loader_views(trace: Trace) -> list[LoaderView]:
    """The loaders of one trainer, most expensive first. Empty when it never iterated one."""
    views = _views_by_site(trace)
    _fill_passes(trace, views)
    _fill_device_clock(trace, views)
    alive = [view for view in views.values() if view.passes]
    _set_roles(trace, alive)
    alive = _without_inner(_merge_remade(alive))
    return sorted(alive, key=lambda view: (view.role == "validation", -view.wait_ns, view.begin))


def _without_inner(views: list[LoaderView]) -> list[LoaderView]:
    """Leaves out loaders that a dataset reads: their time is part of the outer loader's fetch."""
    return [view for view in views if not any(_reads(outer, view) for outer in views if outer is not view)]


def _reads(outer: LoaderView, inner: LoaderView) -> bool:
    waits = sorted((step.wait0, step.wait1) for step in outer.steps)
    starts = [t0 for t0, _ in waits]
    inside = 0
    for step in inner.steps:
        at = bisect.bisect_right(starts, step.wait0) - 1
        inside += at >= 0 and step.wait1 <= waits[at][1]
    return bool(inner.steps) and inside * 10 >= len(inner.steps) * 9


def _merge_remade(views: list[LoaderView]) -> list[LoaderView]:
    """One view for loaders that a program makes anew, dataset and all, in each epoch.

    Frameworks make training and validation loaders at one line, too: those differ in their role, or take turns.
    """
    merged: dict[tuple[str, str, str | None], list[LoaderView]] = {}
    for view in sorted(views, key=lambda one: one.begin):
        alike = merged.setdefault((view.site, view.role, view.info.get("dataset")), [])
        known = next((one for one in alike if one.end <= view.begin), None)
        if known is not None:
            known.absorb(view)
        else:
            alike.append(view)
    return [view for alike in merged.values() for view in alike]


def _views_by_site(trace: Trace) -> dict[tuple[str, int | None], LoaderView]:
    infos = {line.get("loader"): line for line in trace.lines("loader")}
    views: dict[tuple[str, int | None], LoaderView] = {}
    for line in trace.lines("iter"):
        if "iter" not in line:
            continue
        info = infos.get(line.get("loader"), {"site": "?"})
        site = info.get("site") or "?"
        key = (site, line.get("loader"))
        view = views.get(key)
        if view is None:
            view = views[key] = LoaderView(site, info, set(), {}, {}, is_call=bool(info.get("call")))
        view.info = info
        view.iter_ids.add(line["iter"])
        view.workers[line["iter"]] = line.get("workers") or []
        view.queues[line["iter"]] = line.get("queue") or 0
    return views


def _fill_passes(trace: Trace, views: dict[tuple[str, int | None], LoaderView]) -> None:
    owner = {iter_id: view for view in views.values() for iter_id in view.iter_ids}
    epochs: dict[int, list[Event]] = {}
    nexts: dict[int, list[Event]] = {}
    for event in trace.of(Kind.EPOCH):
        epochs.setdefault(event.a, []).append(event)
    for event in trace.of(Kind.NEXT):
        nexts.setdefault(event.a, []).append(event)
    for event in trace.of(Kind.CALL):
        nexts.setdefault(event.a, []).append(event)
    ends, marks = _loose_ends(trace), _marks(trace)
    for iter_id, events in nexts.items():
        view = owner.get(iter_id)
        if view is not None:
            view.passes.extend(_passes_of(iter_id, epochs.get(iter_id, []), events, ends, marks))
    for view in views.values():
        view.passes.sort(key=lambda one: one.begin)


def _loose_ends(trace: Trace) -> list[int]:
    # A loop that was left by break has no StopIteration: its last body ends with the last thing seen of the step.
    return sorted(event.t1 for kind in (Kind.BACKWARD, Kind.OPTIMIZER) for event in trace.of(kind))


def _marks(trace: Trace) -> list[int]:
    # Where any loop over any loader of this process begins or asks for its next batch.
    return sorted(event.t0 for kind in (Kind.NEXT, Kind.CALL, Kind.EPOCH) for event in trace.of(kind))


def _passes_of(
    iter_id: int, epochs: list[Event], nexts: list[Event], ends: list[int], marks: list[int]
) -> Iterable[Pass]:
    starts = [event.t0 for event in epochs]
    groups: dict[int, list[Event]] = {}
    for event in nexts:
        groups.setdefault(bisect.bisect_right(starts, event.t0) - 1, []).append(event)
    for number, group in sorted(groups.items()):
        epoch = epochs[number] if number >= 0 else None
        resumes = max(number, 0)
        if epoch is not None:
            resumes = epoch.d
        yield _one_pass(iter_id, resumes, epoch, group, ends, marks)


def _one_pass(
    iter_id: int, resumes: int, epoch: Event | None, events: list[Event], ends: list[int], marks: list[int]
) -> Pass:
    steps: list[Step] = []
    stop = None
    for i, event in enumerate(events):
        if event.kind == Kind.NEXT and event.c & (f.NEXT_STOP | f.NEXT_ERROR):
            stop = event if event.c & f.NEXT_STOP else stop
            continue
        follower = events[i + 1] if i + 1 < len(events) else None
        end = follower.t0 if follower is not None else _loose_end(event.t1, steps, ends, marks)
        is_call = event.kind == Kind.CALL
        task = f.NONE if is_call else event.e
        wait_ns = event.t1 - event.t0
        on_cpu = min(event.d if event.d != f.NONE else _SHORT_NS, wait_ns)
        delivered = len(steps) if is_call else event.b
        first = not steps and epoch is not None
        step = Step(iter_id, resumes, task, event.t0, event.t1, end, first, on_cpu, delivered)
        step.queued_ns = None if is_call else _queued_ns(event.c)
        steps.append(step)
    begin = epoch.t0 if epoch is not None else events[0].t0
    end = stop.t1 if stop is not None else (steps[-1].end if steps else events[-1].t1)
    queued = None if epoch is None or epoch.e == f.NONE else epoch.e
    return Pass(iter_id, begin, end, epoch.dur_ns if epoch else 0, stop.dur_ns if stop else 0, steps, queued)


def _queued_ns(flags: int) -> int | None:
    told = flags >> f.NEXT_QUEUED_SHIFT
    return (told - 1) * 1000 if told else None


def _loose_end(t1: int, steps: list[Step], ends: list[int], marks: list[int]) -> int:
    """The end of a last body that no ``next()`` follows. Another loop's beginning bounds it, unless it is a zip's."""
    end = _end_after(t1, ends)
    if steps and _any_between(marks, steps[-1].wait1, steps[-1].end):
        return end
    at = bisect.bisect_left(marks, t1)
    return min(end, marks[at]) if at < len(marks) else end


def _end_after(t1: int, ends: list[int]) -> int:
    # Backward and optimizer follow the delivery; take those before the next second's silence, else nothing.
    at = bisect.bisect_right(ends, t1)
    return ends[min(at + 1, len(ends) - 1)] if at < len(ends) else t1


def _fill_device_clock(trace: Trace, views: dict[tuple[str, int | None], LoaderView]) -> None:
    idle = {(event.a, event.b, event.t0): event.c for event in trace.of(Kind.DEVICE) if event.c != f.NONE}
    if not idle:
        return
    by_key: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (iter_id, number, when), ns in idle.items():
        by_key.setdefault((iter_id, number), []).append((when, ns))
    for view in views.values():
        for step in view.steps:
            later = [pair for pair in by_key.get((step.iter_id, step.delivered), ()) if pair[0] >= step.wait1]
            step.idle_ns = min(later)[1] if later else None


def _set_roles(trace: Trace, views: list[LoaderView]) -> None:
    backwards = [event.t0 for event in trace.of(Kind.BACKWARD)] or [event.t0 for event in trace.of(Kind.OPTIMIZER)]
    backwards.sort()
    if not backwards:
        return
    direct = dict.fromkeys(range(len(views)), 0)
    for owner, step, asked in _until_others(views):
        direct[owner] += _any_between(backwards, step.wait1, min(step.end, asked))
    for owner, view in enumerate(views):
        view.role = "train" if direct[owner] and direct[owner] * 4 >= len(view.steps) else "validation"
    trains = [view for view in views if view.role == "train"]
    for view in views:
        # Read before another loader within one training step (zip, GANs): that one comes between it and the backward.
        near = [other for other in trains if other.begin <= view.end and view.begin <= other.end]
        if view.role == "validation" and any(_alternate(view, other) for other in near):
            view.role = "train"


def _until_others(views: list[LoaderView]) -> Iterable[tuple[int, Step, int]]:
    """Each step with its view's number, and when another loader is asked next: a backward after that is not its own."""
    steps = sorted(((step.wait0, owner, step) for owner, view in enumerate(views) for step in view.steps), key=_by_time)
    asked, last = 1 << 62, 1 << 62  # of the next step of another owner; of the step looked at before
    before = -1
    for wait0, owner, step in reversed(steps):
        if owner != before and before >= 0:
            asked = last
        yield owner, step, asked
        before, last = owner, wait0


def _by_time(row: tuple[int, int, Step]) -> tuple[int, int]:
    return row[:2]


def _alternate(view: LoaderView, other: LoaderView) -> bool:
    """Whether the two take turns, one batch of each; a validation loop has many training steps to one of its own."""
    marks = sorted(step.wait1 for step in other.steps)
    own = [bisect.bisect_right(marks, step.wait1) for step in view.steps]
    span = own[-1] - own[0] + 1 if own else 0
    return len(own) > 1 and len(set(own)) * 2 > len(own) and span <= 1.5 * len(own)


def _any_between(sorted_times: list[int], t0: int, t1: int) -> bool:
    at = bisect.bisect_left(sorted_times, t0)
    return at < len(sorted_times) and sorted_times[at] < t1
