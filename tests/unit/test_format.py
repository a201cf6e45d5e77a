"""The agent repeats the numbers of records/rundir.py, because it may run where headrace is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import headrace
from headrace.records import rundir

ROOT = Path(headrace.__file__).parent
AGENT = next(p for p in (ROOT / name / "agent" / "_headrace_agent" for name in ("observer", "observe")) if p.exists())


@pytest.fixture
def part(monkeypatch):
    """Imports a module of the agent; everything is forgotten again, and nothing is hooked."""
    for name in [name for name in sys.modules if name.startswith("_headrace_agent")]:
        monkeypatch.delitem(sys.modules, name)
    path = AGENT / "__init__.py"
    spec = importlib.util.spec_from_file_location("_headrace_agent", path, submodule_search_locations=[str(AGENT)])
    module = importlib.util.module_from_spec(spec)
    sys.modules["_headrace_agent"] = module
    spec.loader.exec_module(module)
    yield lambda name: importlib.import_module(f"_headrace_agent.{name}")
    for name in [name for name in sys.modules if name.startswith("_headrace_agent")]:
        del sys.modules[name]


def test_layout(part):
    """Magic, sizes, the ring, and the cells of header and control are the same in both."""
    writer = part("writer")
    for ours, theirs in {
        "MAGIC": "EVENT_MAGIC", "HEADER_BYTES": "EVENT_HEADER_BYTES", "EVENT_BYTES": "EVENT_BYTES", "NONE": "NONE",
        "HEAD_EVENTS": "HEAD_EVENTS", "RING_EVENTS": "RING_EVENTS",
        "CELL_MAGIC": "CELL_MAGIC", "CELL_NUM_EVENTS": "CELL_NUM_EVENTS", "CELL_PID": "CELL_PID",
        "CELL_START_NS": "CELL_START_NS", "CELL_HOOK_NS": "CELL_HOOK_NS", "CELL_NUM_STEPS": "CELL_NUM_STEPS",
    }.items():  # fmt: skip
        assert getattr(writer, ours) == getattr(rundir, theirs), ours
    for name in ("STOP", "SAMPLE_UNTIL_NS", "MAX_STEPS", "WARMUP_STEPS"):
        assert getattr(writer.Control, name) == getattr(rundir, f"CONTROL_{name}"), name


@pytest.mark.parametrize("name", ["loaders", "workers", "steps", "device", "calls"])
def test_kinds_of_events(part, name):
    """Every kind of event that a module of the agent writes has the number of its name in EventKind."""
    module = part(name)
    kinds = {key: value for key, value in vars(module).items() if key in rundir.EventKind.__members__}
    assert kinds
    assert kinds == {key: int(rundir.EventKind[key]) for key in kinds}


def test_flags(part):
    """Flags of NEXT."""
    loaders = part("loaders")
    assert (loaders.STOP, loaders.ERROR) == (rundir.NEXT_STOP, rundir.NEXT_ERROR)
    assert loaders.QUEUED_SHIFT == rundir.NEXT_QUEUED_SHIFT


def test_round_trip(part, tmp_path):
    """What the agent writes is what headrace reads, also when the ring has gone round."""
    from headrace.core.events import decode

    module = part("writer")
    module.HEAD_EVENTS, module.RING_EVENTS, module.CHUNK_EVENTS = 4, 8, 4
    module._MAX_EVENTS = 12
    module._FILE_BYTES = module.HEADER_BYTES + 12 * module.EVENT_BYTES
    written = module.Writer(str(tmp_path), 5)
    for i in range(3):
        written.event(1, 10 * i, 10 * i + 1, i, 2, 3, 4, 5)
    file = decode((tmp_path / f"{written.pid}-5.ev").read_bytes())
    assert (file.pid, file.start_ns, file.num_lost) == (written.pid, 5, 0)
    assert [tuple(event) for event in file.events] == [(1, 10 * i, 10 * i + 1, i, 2, 3, 4, 5) for i in range(3)]
    for i in range(3, 20):
        written.event(1, i, i, i)
    cells = memoryview((tmp_path / f"{written.pid}-5.ev").read_bytes()).cast("Q")
    assert cells[module.CELL_NUM_EVENTS] == 20
    kept = sorted(cells[512 + 8 * slot + 3] for slot in range(12))
    assert kept == [0, 1, 2, 3, *range(12, 20)]
    written.close()


def test_bad_fields_are_no_error(part, tmp_path):
    """A field that is no number below 2**64 loses its event and raises nothing; so does an event after close."""
    written = part("writer").Writer(str(tmp_path), 5)
    for bad in (-1, None, 1 << 64, "x"):
        written.event(1, 0, 0, bad)
    written.close()
    written.event(1, 0, 0)
    written.add(4, 10)
    written.close()


def test_full_disk_is_said_once(part, tmp_path, monkeypatch):
    """When no block can be had, events stop without an error, and the record says why."""
    module = part("writer")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    written = module.Writer(str(tmp_path), 5)
    for _ in range(3):
        written.event(1, 0, 0)
    (line,) = (tmp_path / f"{written.pid}-5.meta").read_text().splitlines()
    assert "No space left on device" in line
    assert "No space" in written.broken


def test_a_field_that_is_no_number_leaves_no_event(part, tmp_path):
    """Half an event must not count as a whole one when the next is written."""
    from headrace.core.events import decode

    writer = part("writer").Writer(str(tmp_path), 1)
    writer.event(1, 30, 40, 7, 1, 0, 5, -1)
    writer.event(2, 50, 60)
    writer.close()
    file = decode(next(tmp_path.glob("*.ev")).read_bytes())
    assert [event.kind for event in file.events] == [2]
