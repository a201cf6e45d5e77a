"""Decodes the mapped event files of the agent into plain tuples, and groups them by kind. Pure."""

from __future__ import annotations

import functools
import operator
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from ..records import rundir as f

_EVENT = struct.Struct("<8Q")
_CELLS = struct.Struct("<8Q")


class Event(NamedTuple):
    """One event; see ``records.rundir.EventKind`` for the meaning of ``a`` to ``e``. Times are monotonic ns."""

    kind: int
    t0: int
    t1: int
    a: int
    b: int
    c: int
    d: int
    e: int

    @property
    def dur_ns(self) -> int:
        return self.t1 - self.t0


#: As ``Event._make``, without a Python frame per event: a long run has 400,000.
_make: Callable[[tuple[int, ...]], Event] = functools.partial(tuple.__new__, Event)
_OPTIMIZER, _BACKWARD = f.EventKind.OPTIMIZER, f.EventKind.BACKWARD
_KIND, _T0 = operator.itemgetter(0), operator.itemgetter(1)


class EventFile(NamedTuple):
    """A decoded ``.ev`` file. ``num_lost``: events that the ring has overwritten (they lie between head and ring)."""

    pid: int
    start_ns: int
    hook_ns: int
    events: list[Event]
    num_lost: int


def decode(data: bytes) -> EventFile | None:
    """Decodes the bytes of a ``.ev`` file, also one whose writer was killed in the middle. None when it is not one."""
    if len(data) < f.EVENT_HEADER_BYTES:
        return None
    cells = _CELLS.unpack_from(data)
    if cells[f.CELL_MAGIC] != f.EVENT_MAGIC:
        return None
    written = cells[f.CELL_NUM_EVENTS]
    capacity = f.HEAD_EVENTS + f.RING_EVENTS
    end = min(f.EVENT_HEADER_BYTES + min(written, capacity) * f.EVENT_BYTES, len(data))
    end -= (end - f.EVENT_HEADER_BYTES) % f.EVENT_BYTES
    body = memoryview(data)[f.EVENT_HEADER_BYTES : end]
    events = list(map(_make, _EVENT.iter_unpack(body)))
    if written > capacity:
        at = f.HEAD_EVENTS + (written - f.HEAD_EVENTS) % f.RING_EVENTS
        events = events[: f.HEAD_EVENTS] + events[at:] + events[f.HEAD_EVENTS : at]
    if not all(map(_KIND, events)):  # reserved by a thread that was killed before it wrote
        events = [event for event in events if event.kind]
    num_lost = max(written - capacity, 0)
    return EventFile(cells[f.CELL_PID], cells[f.CELL_START_NS], cells[f.CELL_HOOK_NS], events, num_lost)


class Trace:
    """All that one interpreter or fork left: its meta lines and its events by kind (each list in time order)."""

    def __init__(self, start: dict[str, Any], meta: list[dict[str, Any]], file: EventFile | None) -> None:
        self.start = start
        self.pid: int = start["pid"]
        self.ppid: int = start.get("ppid", 0)
        self.start_ns: int = start.get("t_ns", 0)
        self.meta = meta
        # Ranks that are forked get theirs after the fork; once they iterate it is known.
        told = [line["rank"] for line in meta if line.get("k") == "iter" and line.get("rank") is not None]
        self.rank: int | None = told[-1] if told else start.get("rank")
        self.hook_ns = file.hook_ns if file else 0
        self.num_lost = file.num_lost if file else 0
        self.by_kind: dict[int, list[Event]] = defaultdict(list)
        # Beside a hole that the ring has left, head and ring are two runs: the recent one is told of.
        events = (file.events[f.HEAD_EVENTS :] if file.num_lost else file.events) if file else []
        for event in events:
            self.by_kind[event[0]].append(event)
        backwards = [Event(_BACKWARD, e.a, e.t0, 0, 0, 0, 0, 0) for e in self.by_kind.get(_OPTIMIZER, ()) if e.a]
        self.by_kind[_BACKWARD] += backwards
        for events in self.by_kind.values():
            events.sort(key=_T0)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The meta lines of one kind, in the order they were written."""
        return [line for line in self.meta if line.get("k") == kind]

    def of(self, kind: f.EventKind) -> list[Event]:
        return self.by_kind.get(kind, [])

    @property
    def is_trainer(self) -> bool:
        return bool(self.of(f.EventKind.NEXT) or self.of(f.EventKind.CALL) or self.of(f.EventKind.OPTIMIZER))

    @property
    def is_worker(self) -> bool:
        return bool(self.lines("worker"))
