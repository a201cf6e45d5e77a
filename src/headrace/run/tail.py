"""Reads the newest events of a run that is still going. Never blocks and never slows the writers."""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.records.rundir import (
    CELL_MAGIC,
    CELL_NUM_EVENTS,
    EVENT_BYTES,
    EVENT_HEADER_BYTES,
    EVENT_MAGIC,
    HEAD_EVENTS,
    NEXT_ERROR,
    NEXT_STOP,
    RING_EVENTS,
    EventKind,
)

#: At most this many events of a process are looked at per reading: 256 KiB, some seconds of a fast trainer.
_MAX_EVENTS = 4096
#: The pace is that of the last seconds, and of so many steps at least.
_WINDOW_NS = 5_000_000_000
_MIN_CALLS = 6
_WATCHED = (EventKind.NEXT, EventKind.CALL, EventKind.DEVICE)
_Event = tuple[int, int, int, int, int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How the loader that waits most is doing; ``num_trainers`` is the number of processes that iterate loaders."""

    step_ns: float
    stall_frac: float
    num_trainers: int


class EventTail:
    """What the trainers of a run did in the last seconds. One thread."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._num_read: dict[Path, int] = {}
        self._recent: dict[Path, list[_Event]] = {}

    def read(self) -> Pace | None:
        """The newest pace; None while there were no steps."""
        for path in self._run_dir.glob("*.ev"):
            new = [event for event in self._new_events(path) if event[0] in _WATCHED]
            if new:
                self._recent[path] = (self._recent.get(path, []) + new)[-_MAX_EVENTS:]
        return measure_pace(self._recent.values())

    def _new_events(self, path: Path) -> list[_Event]:
        try:
            with path.open("rb", buffering=0) as file:
                cells = memoryview(file.read(64)).cast("Q")
                if len(cells) < 8 or cells[CELL_MAGIC] != EVENT_MAGIC:
                    return []  # its writer has only just made it
                end = cells[CELL_NUM_EVENTS]
                begin = max(self._num_read.get(path, 0), end - _MAX_EVENTS)
                self._num_read[path] = end
                return [event for at, num in _spans(begin, end) for event in _read_span(file.fileno(), at, num)]
        except OSError:
            return []


def measure_pace(per_process: Iterable[list[_Event]]) -> Pace | None:
    """Pace of the loader that waits most, from each process's newest NEXT, CALL and DEVICE events. Pure.

    A step lasts from the start of one ``next`` to the start of the following one. The stall is what the device idled
    where a device clock was read, otherwise the data wait.
    """
    paces: list[tuple[float, float]] = []
    num_trainers = 0
    for events in per_process:
        found = [pace for pace in map(_pace_of, _by_iterator(events).values()) if pace is not None]
        num_trainers += bool(found)
        paces += found
    if not paces:
        return None
    step_ns, stall_frac = max(paces, key=lambda pace: pace[0] * pace[1])
    return Pace(step_ns=step_ns, stall_frac=stall_frac, num_trainers=num_trainers)


def _by_iterator(events: list[_Event]) -> dict[int, list[_Event]]:
    found: defaultdict[int, list[_Event]] = defaultdict(list)
    for event in events:
        found[event[3]].append(event)
    return found


def _pace_of(events: list[_Event]) -> tuple[float, float] | None:
    """Mean step time and stall fraction of one iterator; None with less than one whole step."""
    calls = _last(sorted((e for e in events if _is_call(e)), key=lambda event: event[1]))
    if len(calls) < 2:
        return None
    total_ns = calls[-1][1] - calls[0][1]
    if total_ns <= 0:
        return None
    idle_ns = {event[4]: event[5] for event in events if event[0] == EventKind.DEVICE}
    stall_ns = sum(min(idle_ns.get(e[4], e[2] - e[1]), e[2] - e[1]) for e in calls[:-1])
    return total_ns / (len(calls) - 1), min(stall_ns / total_ns, 1.0)


def _is_call(event: _Event) -> bool:
    return event[0] == EventKind.CALL or (event[0] == EventKind.NEXT and not event[5] & (NEXT_STOP | NEXT_ERROR))


def _last(calls: list[_Event]) -> list[_Event]:
    begin_ns = calls[-1][1] - _WINDOW_NS if calls else 0
    first_in_window = next((at for at, call in enumerate(calls) if call[1] >= begin_ns), 0)
    return calls[min(first_in_window, max(0, len(calls) - _MIN_CALLS)) :]


def _spans(begin: int, end: int) -> list[tuple[int, int]]:
    """Where events ``begin..end`` lie: (first slot, number), in order; the ring may be entered and may wrap."""
    spans = []
    while begin < end:
        if begin < HEAD_EVENTS:
            slot, room = begin, HEAD_EVENTS - begin
        else:
            place = (begin - HEAD_EVENTS) % RING_EVENTS
            slot, room = HEAD_EVENTS + place, RING_EVENTS - place
        num = min(end - begin, room)
        spans.append((slot, num))
        begin += num
    return spans


def _read_span(fd: int, slot: int, num: int) -> list[_Event]:
    data = os.pread(fd, num * EVENT_BYTES, EVENT_HEADER_BYTES + slot * EVENT_BYTES)
    whole = len(data) // EVENT_BYTES * EVENT_BYTES
    return list(struct.iter_unpack("<8Q", data[:whole]))
