"""The record holds enough to draw a run, and never more than promised."""

from __future__ import annotations

import pytest

from headrace.core import picture
from headrace.core.attribution import TaskIndex
from headrace.core.timeline import loader_views
from tests.unit.synth import MS, ZERO_NS, Kind, Service, Trainer


def drawn(trainer):
    (view,) = loader_views(trainer.trace())
    workers = {process.pid: process.trace() for process in trainer.workers}
    tasks = TaskIndex(trainer.trace(), workers, view).all
    return view, picture.series(view, ZERO_NS), picture.lanes(trainer.trace(), view, tasks, ZERO_NS)


def columns(record, names):
    return [getattr(record, name) for name in names]


SERIES = ("step_idx", "start_ns", "step_ns", "wait_ns", "stall_ns", "epoch_start")
LANES = ("lane", "kind", "start_ns", "dur_ns", "batch")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_short_run_is_drawn_whole(num_workers):
    """Every step and every batch of a short run is there, on the lane of its process."""
    trainer = Trainer()
    loader = trainer.loader(num_workers=num_workers, batches=20, collate_ns=1 * MS, pin_ns=1 * MS)
    trainer.train(loader, epochs=2)
    _, series, lanes = drawn(trainer)
    assert series.step_idx == list(range(40))
    assert series.num_steps_seen == 40
    assert series.epoch_start == ([True] + [False] * 19) * 2
    names = [lanes.kinds[kind] for kind in lanes.kind]
    for name in ("wait", "step", "fetch", "collate", "backward", "optimizer"):
        assert names.count(name) == 40, name
    assert names.count("epoch") == 2
    assert names.count("transport") == (40 if num_workers else 0)
    assert names.count("pin") == (40 if num_workers else 0)
    assert len(lanes.lanes) == 1 + 2 * num_workers
    assert min(lanes.start_ns) > 0
    assert min(lanes.dur_ns) >= 0
    assert len({len(column) for column in columns(lanes, LANES)}) == 1
    assert max(lanes.lane) < len(lanes.lanes)


@pytest.mark.parametrize("limit", [7, 10, 50, 399])
def test_a_long_run_keeps_its_worst_steps(monkeypatch, limit):
    """Series keep at most as many steps as promised, the worst among them, in order and spread over the run."""
    monkeypatch.setattr(picture, "MAX_SERIES_STEPS", limit)
    trainer = Trainer()
    slow = {37: Service(blocked_ns=900 * MS), 311: Service(blocked_ns=800 * MS)}
    trainer.train(trainer.loader(batches=400, fetch=lambda j: slow.get(j, Service(on_cpu_ns=1 * MS))))
    _, series, _ = drawn(trainer)
    assert len(series.step_idx) <= limit
    assert {37, 311} <= set(series.step_idx)
    assert series.step_idx == sorted(set(series.step_idx))
    assert series.num_steps_seen == 400
    assert len({len(column) for column in columns(series, SERIES)}) == 1
    assert series.step_idx[-1] > 300


@pytest.mark.parametrize("limit", [5, 60, 333])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_a_long_run_the_end_is_drawn(monkeypatch, limit, num_workers):
    """Lanes keep exactly the last events by their start, as if all had been drawn and cut."""
    trainer = Trainer()
    trainer.train(trainer.loader(num_workers=num_workers, batches=100))
    *_, whole = drawn(trainer)
    monkeypatch.setattr(picture, "MAX_LANE_EVENTS", limit)
    *_, lanes = drawn(trainer)
    assert len(lanes.start_ns) == limit
    assert lanes.start_ns == whole.start_ns[-limit:]
    cut = [whole.kinds[kind] for kind in whole.kind[-limit:]]
    assert sorted(lanes.kinds[kind] for kind in lanes.kind) == sorted(cut)


def test_events_outside_the_loaders_time_are_not_drawn():
    """What happened before the loader's first pass belongs to no picture of it."""
    trainer = Trainer()
    trainer.note(Kind.SAVE, trainer.now - 50 * MS, trainer.now - 10 * MS)
    trainer.train(trainer.loader(batches=5))
    *_, lanes = drawn(trainer)
    assert "save" not in lanes.kinds
