"""--live: the status line comes from the agents' files while they are being written, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from headrace.records.rundir import HEAD_EVENTS, NEXT_STOP, RING_EVENTS, EventKind
from headrace.run.live import status_text
from headrace.run.tail import EventTail, Pace, _spans, measure_pace
from tests.process.launching import SRC, environment, headrace, running
from tests.process.test_launch_signals import Terminal

MS = 1_000_000


def next_event(k, iterator=1, step_ms=10, wait_ms=4, flags=0):
    t0 = 1_000 * MS + k * step_ms * MS
    return (int(EventKind.NEXT), t0, t0 + wait_ms * MS, iterator, k, flags, 0, 0)


def test_pace_is_that_of_the_last_steps():
    """Step time from one `next` to the following one; the stall is the data wait where no device clock was read."""
    assert measure_pace([[next_event(k) for k in range(20)]]) == Pace(step_ns=10 * MS, stall_frac=0.4, num_trainers=1)


def test_device_clock_decides_over_the_data_wait():
    """Where the device's idle time is known, it is the stall."""
    events = [next_event(k) for k in range(20)]
    events += [(int(EventKind.DEVICE), 0, 0, 1, k, MS, 0, 0) for k in range(20)]
    assert measure_pace([events]).stall_frac == pytest.approx(0.1)


def test_loader_that_waits_most_is_shown():
    """Of several loaders and ranks the one with the longest wait per step; the number of trainers is counted."""
    quick = [next_event(k, iterator=1, wait_ms=1) for k in range(9)]
    slow = [next_event(k, iterator=2, wait_ms=9) for k in range(9)]
    pace = measure_pace([quick + slow, quick, []])
    assert (pace.stall_frac, pace.num_trainers) == (0.9, 2)


def test_long_steps_are_seen_too():
    """Steps longer than the window are measured over the last few; the end of an epoch is no step."""
    events = [next_event(k, step_ms=20_000) for k in range(9)] + [next_event(9, step_ms=20_000, flags=NEXT_STOP)]
    assert measure_pace([events]).step_ns == 20_000 * MS
    assert measure_pace([events[:1]]) is None
    assert measure_pace([]) is None


def test_spans_cover_each_new_event_once():
    """The head is read in place, the ring where it wraps in two pieces."""
    assert _spans(0, 5) == [(0, 5)]
    assert _spans(HEAD_EVENTS - 2, HEAD_EVENTS + 3) == [(HEAD_EVENTS - 2, 2), (HEAD_EVENTS, 3)]
    end = HEAD_EVENTS + RING_EVENTS
    assert _spans(end - 1, end + 2) == [(end - 1, 1), (HEAD_EVENTS, 2)]
    assert _spans(7, 7) == []


def test_line_is_plain_words():
    """Step time, stall, cause; "..." while the cause is not known."""
    pace = Pace(step_ns=12.3 * MS, stall_frac=0.61, num_trainers=1)
    assert status_text(pace, None) == "headrace: step 12.3 ms, stall 61 %, cause ..."
    assert status_text(None, None) == "headrace: no steps seen yet"
    several = Pace(step_ns=12.3 * MS, stall_frac=0.61, num_trainers=4)
    assert status_text(several, "storage").endswith("cause storage (4 trainers)")


def agent_writer(run_dir):
    """The agent's own writer, loaded from its file: the agent is no part of the package's import tree."""
    path = SRC / "headrace" / "observe" / "agent" / "_headrace_agent" / "writer.py"
    spec = importlib.util.spec_from_file_location("agent_writer_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Writer(str(run_dir), 1)


def test_tail_reads_what_the_agent_writes(tmp_path):
    """Events are seen while their file is open for writing; each reading looks at new ones only."""
    tail = EventTail(tmp_path)
    assert tail.read() is None
    writer = agent_writer(tmp_path)
    for k in range(30):
        writer.event(*next_event(k))
    assert tail.read() == Pace(step_ns=10 * MS, stall_frac=0.4, num_trainers=1)
    for k in range(30, 2000):
        writer.event(*next_event(k, wait_ms=8))
    assert tail.read().stall_frac == pytest.approx(0.8)
    writer.close()
    assert tail.read().stall_frac == pytest.approx(0.8)


#: Writes events as a trainer would, then waits for a line of input.
TRAINER = """
import os, sys
sys.path[:0] = [{tests!r}, {src!r}]
from pathlib import Path
from tests.process.test_launch_live import agent_writer, next_event
writer = agent_writer(Path(os.environ["HEADRACE_RUN_DIR"]))
for k in range(30):
    writer.event(*next_event(k))
print("ready", flush=True)
input()
"""


@pytest.mark.slow
def test_status_line_on_a_terminal(tmp_path):
    """The line is written over in place, and erased before the report."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER.format(tests=str(SRC.parent), src=str(SRC)))
    terminal = Terminal(headrace("run", "--live", trainer), environment(tmp_path, TERM="xterm"))
    terminal.read_until("ready")
    terminal.read_until("\r\x1b[Kheadrace: step 10 ms, stall 40 %, cause ...")
    terminal.type(b"\n")
    said = terminal.read_to_end()
    assert "\r\x1b[KREPORT ended=exit exit_code=0" in said
    assert terminal.wait() == 0


@pytest.mark.slow
def test_no_escape_codes_into_a_file(tmp_path):
    """Where stderr is no terminal there is nothing to erase."""
    with running(headrace("run", "--live", sys.executable, "-c", "pass"), environment(tmp_path)) as process:
        assert process.communicate(timeout=30)[1] == "REPORT ended=exit exit_code=0 signal=None\n"
