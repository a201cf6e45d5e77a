"""Series and lanes: enough of the run to draw it, and to answer later questions from the file alone. Pure."""

from __future__ import annotations

import heapq
import operator

from ..records.run import MAX_LANE_EVENTS, MAX_SERIES_STEPS, Lane, LaneKind, Lanes, Series
from ..records.rundir import EventKind
from .attribution import Task
from .events import Trace
from .timeline import LoaderView, Step

_SPANS: tuple[tuple[EventKind, LaneKind], ...] = (
    (EventKind.BACKWARD, "backward"), (EventKind.OPTIMIZER, "optimizer"), (EventKind.COPY, "copy"),
    (EventKind.SYNC, "sync"), (EventKind.DIST, "dist"), (EventKind.SAVE, "save"),
)  # fmt: skip


#: (lane, kind, start, duration, batch)
_Row = tuple[int, LaneKind, int, int, int]
_START = operator.itemgetter(2)


def series(view: LoaderView, zero_ns: int) -> Series:
    """Columns over steps. Longer runs keep every n-th step and the worst ones."""
    steps = view.steps
    keep = _kept(steps)
    return Series(
        step_idx=keep,
        start_ns=[steps[i].wait0 - zero_ns for i in keep],
        step_ns=[steps[i].step_ns for i in keep],
        wait_ns=[steps[i].wait_ns for i in keep],
        stall_ns=[steps[i].stall_ns for i in keep],
        epoch_start=[steps[i].first for i in keep],
        num_steps_seen=len(steps),
    )


def _kept(steps: list[Step]) -> list[int]:
    if len(steps) <= MAX_SERIES_STEPS:
        return list(range(len(steps)))
    half = MAX_SERIES_STEPS // 2
    worst = heapq.nlargest(half, range(len(steps)), key=lambda i: steps[i].step_ns)
    even = range(0, len(steps), len(steps) // half + 1)
    return sorted({*worst, *even})[:MAX_SERIES_STEPS]


def lanes(trace: Trace, view: LoaderView, tasks: list[Task], zero_ns: int) -> Lanes:
    """The trainer's, workers' and copies' events of a window: all of a short run, the end of a long one."""
    rows: list[_Row] = []
    since = _shown_since(trace, view)
    _trainer_rows(rows, trace, view, since)
    pids = sorted({task.pid for task in tasks if task.pid != trace.pid})
    number = {pid: i + 1 for i, pid in enumerate(pids)}
    for task in tasks:
        if task.fetch1 >= since:
            _task_rows(rows, task, number.get(task.pid, 0))
    rows.sort(key=_START)
    rows = rows[-MAX_LANE_EVENTS:]
    workers = [Lane(name=f"worker {i}", pid=pid) for i, pid in enumerate(pids)]
    out = Lanes(lanes=[Lane(name="trainer", pid=trace.pid), *workers])
    kinds: dict[LaneKind, int] = {}
    for lane, kind, t0, dur, batch in rows:
        out.lane.append(lane)
        out.kind.append(kinds.setdefault(kind, len(kinds)))
        out.start_ns.append(t0 - zero_ns)
        out.dur_ns.append(dur)
        out.batch.append(batch)
    out.kinds = list(kinds)
    return out


def _shown_since(trace: Trace, view: LoaderView) -> int:
    # What begins before this moment is not among the last MAX_LANE_EVENTS of the trainer alone: no row is made for it.
    starts = [t for step in view.steps for t in (step.wait0, step.wait1)]
    starts.extend(event.t0 for kind, _ in _SPANS for event in trace.of(kind))
    starts.sort()
    return starts[-MAX_LANE_EVENTS] if len(starts) > MAX_LANE_EVENTS else view.begin


def _trainer_rows(rows: list[_Row], trace: Trace, view: LoaderView, since: int) -> None:
    end = view.end
    for i, step in enumerate(view.steps):
        if step.end < since:
            continue
        rows.append((0, "wait", step.wait0, step.wait_ns, i))
        rows.append((0, "step", step.wait1, step.body_ns, i))
    rows.extend((0, "epoch", one.begin, one.iter_ns, -1) for one in view.passes if one.iter_ns)
    for kind, name in _SPANS:
        rows.extend((0, name, event.t0, event.dur_ns, -1) for event in trace.of(kind) if since <= event.t0 < end)


def _task_rows(rows: list[_Row], task: Task, lane: int) -> None:
    batch = task.idx if task.idx < 1 << 62 else -1
    rows.append((lane, "fetch", task.fetch0, task.fetch_ns, batch))
    if task.collate_ns:
        rows.append((lane, "collate", task.collate0, task.collate_ns, batch))
    arrived = task.pin0 or task.recv1
    if lane and arrived is not None and arrived > task.fetch1:
        rows.append((lane, "transport", task.fetch1, arrived - task.fetch1, batch))
    if task.pin0 is not None and task.pin1 is not None:
        rows.append((0, "pin", task.pin0, task.pin1 - task.pin0, batch))
