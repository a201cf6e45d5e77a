"""The trace is what Perfetto reads: valid JSON, named tracks, events that nest, counters of the wait."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.records.run import Lane, Lanes, Loader, Process, Run
from headrace.report import files
from headrace.report.trace import make_trace
from tests.report import report_builders as builders


def tracks(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return found


def assert_nests(events: list[tuple[float, float]]) -> None:
    open_ends: list[float] = []
    for start, end in sorted(events, key=lambda e: (e[0], -e[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


@pytest.mark.parametrize("name", builders.SMALL)
def test_a_trace_is_valid(name: str, tmp_path: Path) -> None:
    """Every run has a trace that is JSON, in order of time, with events that nest on their tracks."""
    files.write_trace(builders.SMALL[name](), tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    times = [event["ts"] for event in trace["traceEvents"]]
    assert times == sorted(times)
    for events in tracks(trace).values():
        assert_nests(events)


def test_everything_is_named_and_counted() -> None:
    """Each event of the lanes is there once, on a named track of a named process; each step has its wait."""
    run = builders.storage(40)
    loader = run.processes[0].loaders[0]
    assert loader.lanes is not None
    events = make_trace(run)["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(loader.lanes.lane)
    assert sum(event["ph"] == "C" for event in events) == 40
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= set(threads)
    assert threads[4711, 4711] == "trainer"
    assert processes[4711] == "trainer"
    assert processes[4712] == "worker"


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 1)), max_size=40)


@pytest.mark.slow
@given(spans)
def test_events_of_any_lane_nest(found: list[tuple[int, int, int]]) -> None:
    """However events of a lane overlap, they are spread over tracks on which they nest, and none is lost."""
    lanes = Lanes(lanes=[Lane(name="a", pid=1, tid=1), Lane(name="b", pid=1)], kinds=["transport"])
    for start, dur, lane in found:
        lanes.start_ns.append(start * 1000)
        lanes.dur_ns.append(dur * 1000)
        lanes.lane.append(lane)
        lanes.kind.append(0)
        lanes.batch.append(-1)
    loader = Loader(site="a.py:1", role="train", lanes=lanes)
    run = Run(headrace="0", command=[], ended="exit", processes=[Process(pid=1, loaders=[loader])])
    placed = tracks(make_trace(run))
    assert sum(map(len, placed.values())) == len(found)
    for events in placed.values():
        assert_nests(events)
