"""Event files decode to what was written, however their writer ended."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.events import Event, EventFile, Trace, decode
from headrace.records import rundir as f
from tests.unit.synth import encode

HEAD, RING = 4, 6
u64 = st.integers(0, f.NONE)
an_event = st.tuples(st.integers(1, 40), u64, u64).map(lambda x: Event(*x, x[2] >> 1, 3, f.NONE, x[1] >> 2, 0))
events_of = st.lists(an_event, max_size=30)


@pytest.fixture(autouse=True, scope="module")
def small_ring():
    patch = pytest.MonkeyPatch()
    patch.setattr(f, "HEAD_EVENTS", HEAD)
    patch.setattr(f, "RING_EVENTS", RING)
    yield
    patch.undo()


@settings(deadline=None, max_examples=50)
@given(events_of)
def test_head_and_ring_come_back_in_the_order_of_writing(events):
    """Whatever was written comes back: all of the head, the last of the ring, and how many were overwritten."""
    file = decode(encode(events, pid=7, start_ns=8, hook_ns=9))
    kept = events[:HEAD] + events[HEAD:][-RING:]
    assert file == EventFile(7, 8, 9, kept, max(len(events) - HEAD - RING, 0))


@settings(deadline=None, max_examples=50)
@given(events_of.filter(lambda events: len(events) <= HEAD + RING), st.integers(0, f.EVENT_HEADER_BYTES + 40 * 64))
def test_a_torn_file_gives_its_whole_events(events, cut):
    """A file cut off anywhere gives the events that are whole, and None without a whole header."""
    file = decode(encode(events)[:cut])
    if cut < f.EVENT_HEADER_BYTES:
        assert file is None
    else:
        assert file is not None
        assert file.events == events[: (cut - f.EVENT_HEADER_BYTES) // f.EVENT_BYTES]


@settings(deadline=None, max_examples=50)
@given(events_of, st.integers(0, 20 * 64))
def test_a_torn_ring_gives_only_what_was_written(events, cut):
    """Also in a file whose ring went round a torn end invents nothing."""
    file = decode(encode(events)[: f.EVENT_HEADER_BYTES + cut])
    assert file is not None
    assert set(file.events) <= set(events)


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=200), st.integers(0, 1 << 40))
def test_other_files_are_no_event_files(noise, written):
    """Bytes without the magic number are not decoded, whatever follows."""
    assert decode(noise.ljust(f.EVENT_HEADER_BYTES, b"\0")) is None
    assert decode(b"") is None


@pytest.mark.parametrize("at", [0, HEAD - 1, HEAD, HEAD + 2])
def test_a_reserved_event_that_was_never_written_is_left_out(at):
    """A thread killed between taking a number and writing leaves zeros; all other events keep their order."""
    events = [Event(1, i, i + 1, 0, 0, 0, 0, 0) for i in range(HEAD + RING + 3)]
    data = bytearray(encode(events))
    start = f.EVENT_HEADER_BYTES + at * 64
    data[start : start + 64] = bytes(64)
    file = decode(bytes(data))
    assert file is not None
    assert len(file.events) == HEAD + RING - 1
    assert [event.t0 for event in file.events] == sorted(event.t0 for event in file.events)


def test_a_trace_groups_by_kind_in_time_order():
    """Events of several threads come in any order and are sorted; unknown kinds and lines are kept out of the way."""
    events = [Event(1, 5, 6, 0, 0, 0, 0, 0), Event(999, 1, 1, 0, 0, 0, 0, 0), Event(1, 2, 3, 0, 0, 0, 0, 0)]
    trace = Trace({"pid": 3}, [{}, {"k": "odd"}, {"k": "worker"}], EventFile(3, 0, 0, events, 0))
    assert [event.t0 for event in trace.of(f.EventKind.NEXT)] == [2, 5]
    assert trace.of(f.EventKind.PIN) == []
    assert trace.is_trainer
    assert trace.is_worker


def test_a_trace_without_an_event_file_is_neither_trainer_nor_worker():
    """An interpreter that never imported torch leaves one line and is still a trace."""
    trace = Trace({"pid": 3}, [], None)
    assert not trace.is_trainer
    assert not trace.is_worker
    assert trace.rank is None
