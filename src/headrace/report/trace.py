"""A run as Chrome trace events, which Perfetto opens: trainer, workers and copies on one clock. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.records.run import Lane, Lanes, Process, Run, Series
from headrace.report import text

#: Tracks without a thread of their own get numbers that no Linux thread has (pid_max is at most 2^22).
_FIRST_TID = 10_000_000


def make_trace(run: Run) -> dict[str, Any]:
    """Returns the object form of the Trace Event Format: complete events (us), counters and names."""
    tracks = _Tracks()
    events: list[dict[str, Any]] = []
    for process, loader in text.loaders(run):
        if loader.lanes is not None:
            events += _lane_events(loader.lanes, tracks)
        if loader.series is not None:
            events += _counters(process.pid, loader.site, loader.series)
    events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": [*_process_names(run, tracks), *tracks.names(), *events],
        "displayTimeUnit": "ms",
        "otherData": {"format": run.format, "command": " ".join(map(text.clean, run.command))},
    }


class _Tracks:
    """Gives every event a track on which events nest, as the format demands.

    Events of one lane may overlap without one holding the other (two batches in transport at once); such an event
    goes to the lane's next track.
    """

    def __init__(self) -> None:
        #: Per (pid, tid or name): its tracks as (number, ends of the events that are still open).
        self._tracks: dict[tuple[int, int | str], list[tuple[int, list[int]]]] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._next_tid = _FIRST_TID

    def place(self, lane: Lane, start_ns: int, end_ns: int) -> int:
        """Returns the track's number for an event; events must come in order of (start, -end)."""
        tracks = self._tracks.setdefault((lane.pid, lane.tid or lane.name), [])
        for tid, open_ends in tracks:
            while open_ends and open_ends[-1] <= start_ns:
                open_ends.pop()
            if not open_ends or end_ns <= open_ends[-1]:
                open_ends.append(end_ns)
                return tid
        return self._open(lane, tracks, end_ns)

    def _open(self, lane: Lane, tracks: list[tuple[int, list[int]]], end_ns: int) -> int:
        tid = lane.tid if lane.tid and not tracks else self._next_tid
        self._next_tid += tid == self._next_tid
        self._names[lane.pid, tid] = text.clean(lane.name) + (f" ({len(tracks) + 1})" if tracks else "")
        tracks.append((tid, [end_ns]))
        return tid

    def pids(self) -> list[int]:
        return sorted({pid for pid, _ in self._names})

    def names(self) -> Iterator[dict[str, Any]]:
        """Metadata events that name the tracks, in the order in which they were opened."""
        for order, ((pid, tid), name) in enumerate(self._names.items()):
            yield _meta("thread_name", pid, tid, name=name)
            yield _meta("thread_sort_index", pid, tid, sort_index=order)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _process_names(run: Run, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    """The trainers by rank, other processes (workers) by the name of their lane."""
    known = {process.pid: process for process in run.processes if process.loaders}
    for order, pid in enumerate([*known, *(pid for pid in tracks.pids() if pid not in known)]):
        yield _meta("process_name", pid, 0, name=_process_name(known.get(pid)))
        yield _meta("process_sort_index", pid, 0, sort_index=order)


def _process_name(process: Process | None) -> str:
    if process is None:
        return "worker"
    return "trainer" if process.rank is None else f"trainer, rank {process.rank}"


def _lane_events(lanes: Lanes, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    order = sorted(range(len(lanes.lane)), key=lambda i: (lanes.start_ns[i], -lanes.dur_ns[i]))
    for i in order:
        lane, kind, start_ns = lanes.lanes[lanes.lane[i]], lanes.kinds[lanes.kind[i]], lanes.start_ns[i]
        event: dict[str, Any] = {
            "ph": "X",
            "name": text.LANE_WORDS.get(kind, kind),
            "cat": kind,
            "pid": lane.pid,
            "tid": tracks.place(lane, start_ns, start_ns + lanes.dur_ns[i]),
            **_span(start_ns, start_ns + lanes.dur_ns[i]),
        }
        if lanes.batch[i] >= 0:
            event["args"] = {"batch": lanes.batch[i]}
        yield event


def _span(start_ns: int, end_ns: int) -> dict[str, int]:
    """Whole us: rounding both ends down keeps events nested, which the sum of two fractions would not."""
    return {"ts": start_ns // 1000, "dur": end_ns // 1000 - start_ns // 1000}


def _counters(pid: int, site: str, series: Series) -> Iterator[dict[str, Any]]:
    """Data wait and stall of each step, as a counter that steps at the step's start."""
    name = f"data wait in ms, {text.clean(site)}"
    for start_ns, wait_ns, stall_ns in zip(series.start_ns, series.wait_ns, series.stall_ns, strict=True):
        args = {"wait": wait_ns / 1e6, "stall": stall_ns / 1e6}
        yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": start_ns // 1000, "args": args}
