"""Shares of time: they sum to one, and each stall has its place."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.attribution import TaskIndex
from headrace.core.hostfacts import host_facts
from headrace.core.measure import measure
from headrace.core.timeline import loader_views
from headrace.records.rundir import NEXT_QUEUED_SHIFT
from tests.unit.synth import MS, US, Kind, Service, Trainer, observe


def facts_of(trainer, seen=None):
    """Facts of each loader of one trainer, by site, as ``analyse`` would reduce them."""
    seen = seen or observe([trainer])
    trace = next(trace for trace in seen.traces if trace.pid == trainer.pid)
    workers = {trace.pid: trace for trace in seen.traces if trace.is_worker}
    views = loader_views(trace)
    out = {}
    for view in views:
        pids = {pid for group in view.workers.values() for pid in group}
        host = host_facts(seen.samples, seen.machine, trace.pid, pids, view.begin, view.end)
        others = [other for other in views if other is not view]
        out[view.site] = measure(trace, view, others, TaskIndex(trace, workers, view), host)
    return out


small = st.integers(0, 30).map(lambda ms: ms * MS)


@st.composite
def trainers(draw):
    """Any program of one process: loaders with any stages, validation between or inside, zips, pauses, breaks."""
    trainer = Trainer(body_on_cpu_frac=draw(st.sampled_from([0.0, 0.5, 1.0])))

    def loader(site):
        service = Service(on_cpu_ns=draw(small), run_queue_ns=draw(small), blocked_ns=draw(small))
        slow = dataclasses.replace(service, blocked_ns=service.blocked_ns * draw(st.sampled_from([1, 1, 20])))
        return trainer.loader(
            site=site, num_workers=draw(st.integers(0, 4)), persistent_workers=draw(st.booleans()),
            batches=draw(st.integers(0, 12)), prefetch_factor=draw(st.integers(1, 3)), collate_ns=draw(small),
            fetch=lambda j: slow if j % 7 == 3 else service, serialise_ns=draw(small), deserialise_ns=draw(small),
            pin_ns=draw(st.none() | small),
        )  # fmt: skip

    train, body, shape = (
        loader("t.py:1"),
        draw(small),
        draw(st.sampled_from(["plain", "between", "inside", "zip", "break"])),
    )
    other = None if shape in ("plain", "break") else loader("o.py:1")
    for _ in range(draw(st.integers(1, 3))):
        batches = iter(zip(train, other, strict=False)) if shape == "zip" else iter(train)
        for number, _ in enumerate(batches):
            trainer.body(body, run_queue_ns=body // 4)
            if shape == "inside" and number == 2:
                trainer.train(other, body_ns=1 * MS, backward=False)
            if shape == "break" and number == 4:
                break
        if shape == "between":
            trainer.train(other, body_ns=1 * MS, backward=False)
        trainer.save(draw(small))
    return trainer


@settings(deadline=None, max_examples=40)
@given(trainers())
def test_shares_of_time_sum_to_one(trainer):
    """For any program the parts of a loader's time are within 0..1 and sum to 1, and so do those of its wait."""
    for facts in facts_of(trainer).values():
        assert sum(facts.parts_ns.values()) == pytest.approx(facts.total_ns, rel=1e-9, abs=1e-3)
        assert all(-1e-9 <= facts.share(ns) <= 1 + 1e-9 for ns in facts.parts_ns.values()), facts.parts_ns
        assert sum(facts.wait_ns.values()) == sum(step.wait_ns for step in facts.view.steps)
        assert min(facts.wait_ns.values()) >= 0
        assert sum(facts.charged_ns.values()) <= sum(step.stall_ns for step in facts.view.steady) * (1 + 1e-9) + 1e-3
        if facts.fetch_split is not None:
            assert sum(facts.fetch_split.values()) == pytest.approx(1)
            assert min(facts.fetch_split.values()) >= 0
        assert 0 <= facts.slow_wait_frac <= 1
        assert 0 <= facts.body_on_cpu_frac <= 1


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_steady_stall_leaves_epoch_starts_out(num_workers):
    """Workers that are slow to start cost the epoch, not the steady steps."""
    trainer = Trainer()
    loader = trainer.loader(
        num_workers=num_workers, fetch=Service(on_cpu_ns=2 * MS), worker_boot_ns=900 * MS, batches=30
    )
    trainer.train(loader, epochs=3)
    facts = facts_of(trainer)["train.py:10"]
    assert facts.steady_stall_frac == pytest.approx(0, abs=0.02)
    assert facts.share(facts.parts_ns["epoch"]) == pytest.approx(3 * 900 / (3 * 900 + 3 * 300), abs=0.05)
    assert facts.epoch_excess_ns == pytest.approx(2_700 * MS, rel=0.05)


def test_the_stall_of_a_slow_loader_is_exact():
    """Without workers the stall fraction is fetch over fetch plus body."""
    trainer = Trainer(body_on_cpu_frac=0.9)
    trainer.train(trainer.loader(fetch=Service(on_cpu_ns=30 * MS)), body_ns=10 * MS)
    facts = facts_of(trainer)["train.py:10"]
    assert facts.steady_stall_frac == pytest.approx(0.75, abs=0.001)
    assert facts.stall_ci[0] <= facts.steady_stall_frac <= facts.stall_ci[1]
    assert facts.charged_ns["fetch"] == pytest.approx(39 * 30 * MS, rel=0.001)


def test_waking_up_after_a_sleeping_body_is_no_stall():
    """What cold caches cost after an idle body would be paid by the step itself: at most 1 ms of CPU in next()."""
    trainer = Trainer()
    trainer.train(trainer.loader(fetch=Service(on_cpu_ns=30 * MS)), body_ns=10 * MS)
    assert facts_of(trainer)["train.py:10"].steady_stall_frac == pytest.approx(29 / 40, abs=0.001)


@pytest.mark.parametrize("where", ["inside", "between"])
def test_validation_is_outside_the_training_loader(where):
    """A validation loop costs ``outside`` its whole time once, and its waits are no other loader's."""
    trainer = Trainer()
    quick = Service(on_cpu_ns=1 * MS)
    train = trainer.loader(site="t.py:1", fetch=quick, batches=20)
    held_out = trainer.loader(site="v.py:1", fetch=Service(on_cpu_ns=20 * MS), batches=10)
    for _ in range(3):
        for number in train:
            trainer.body(10 * MS)
            if where == "inside" and number == 9:
                trainer.train(held_out, body_ns=5 * MS, backward=False)
        if where == "between":
            trainer.train(held_out, body_ns=5 * MS, backward=False)
    facts = facts_of(trainer)["t.py:1"]
    rounds = 3 if where == "inside" else 2
    assert facts.parts_ns["outside"] == pytest.approx(rounds * 250 * MS, rel=0.01)
    assert facts.parts_ns["other_loader"] == 0


def test_two_validation_loaders_in_a_zip_cost_their_time_once():
    """Loops that overlap are merged before they are summed."""
    trainer = Trainer()
    train = trainer.loader(site="t.py:1", fetch=Service(on_cpu_ns=1 * MS), batches=20)
    held_out = [trainer.loader(site=f"v.py:{i}", fetch=Service(on_cpu_ns=10 * MS), batches=10) for i in range(2)]
    for number in train:
        trainer.body(10 * MS)
        if number == 9:
            for _ in zip(*held_out, strict=True):
                trainer.body(5 * MS, backward=False)
    facts = facts_of(trainer)["t.py:1"]
    assert facts.nested_ns == pytest.approx(250 * MS, rel=0.02)
    assert facts.parts_ns["outside"] == pytest.approx(250 * MS, rel=0.02)


def test_the_other_loader_of_a_zip_is_a_part_of_its_own():
    """In a zip each loader's wait is the other's ``other_loader``."""
    trainer = Trainer()
    slow = trainer.loader(site="a.py:1", fetch=Service(on_cpu_ns=30 * MS))
    quick = trainer.loader(site="b.py:1", fetch=Service(on_cpu_ns=10 * MS))
    for _ in zip(slow, quick, strict=True):
        trainer.body(10 * MS)
    facts = facts_of(trainer)
    assert facts["a.py:1"].share(facts["a.py:1"].parts_ns["other_loader"]) == pytest.approx(0.2, abs=0.01)
    assert facts["b.py:1"].share(facts["b.py:1"].parts_ns["other_loader"]) == pytest.approx(0.6, abs=0.02)


def test_pauses_are_not_steps():
    """A checkpoint in every tenth body is outside, and does not move the median body."""
    trainer = Trainer()
    for number in trainer.loader(batches=60, fetch=Service(on_cpu_ns=1 * MS)):
        trainer.body(10 * MS)
        if number % 10 == 5:
            trainer.save(100 * MS)
    facts = facts_of(trainer)["train.py:10"]
    assert facts.num_pauses == 6
    assert facts.parts_ns["outside"] == pytest.approx(600 * MS, rel=0.01)
    assert facts.save_ns == 600 * MS
    assert facts.median_body_ns == 10 * MS


def test_a_queued_batch_is_charged_to_what_its_worker_did():
    """One worker far too slow: the wait in its queue is the wait for the fetches before."""
    trainer = Trainer()
    trainer.train(trainer.loader(num_workers=1, prefetch_factor=4, fetch=Service(blocked_ns=50 * MS)), body_ns=5 * MS)
    facts = facts_of(trainer)["train.py:10"]
    steady = sum(step.stall_ns for step in facts.view.steady)
    assert facts.charged_ns["fetch"] == pytest.approx(steady, rel=0.02)
    assert facts.fetch_split["blocked"] == pytest.approx(1)


def test_threads_of_a_pool_are_not_blocked_time():
    """While other threads of the worker work for the fetch, its waiting main thread is not blocked."""
    trainer = Trainer()
    trainer.train(
        trainer.loader(num_workers=1, fetch=Service(on_cpu_ns=10 * MS, blocked_ns=10 * MS, threads=2.0)), body_ns=1 * MS
    )
    assert facts_of(trainer)["train.py:10"].fetch_split["blocked"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("batches", [0, 1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_very_short_runs_raise_nothing(batches, num_workers):
    """No step, one step, one steady step: what cannot be known is None."""
    trainer = Trainer()
    trainer.train(trainer.loader(num_workers=num_workers, batches=batches))
    facts = facts_of(trainer)["train.py:10"]
    assert (facts.steady_stall_frac is None) == (batches < 2)
    assert facts.stall_ci is None


def test_a_clock_that_stands_still_raises_nothing():
    """Waits and bodies of zero length have no shares, and no error."""
    trainer = Trainer()
    trainer.train(trainer.loader(batches=5))
    trainer.events = [event._replace(t0=7, t1=7) for event in trainer.events if event.kind != Kind.EPOCH]
    facts = facts_of(trainer)["train.py:10"]
    assert facts.steady_stall_frac is None
    assert sum(facts.parts_ns.values()) == facts.total_ns == 1


def test_copies_are_counted_by_their_flags():
    """Pageable and blocking copies are told apart; a pinned non-blocking one costs the host nothing."""
    trainer = Trainer()
    trainer.train(trainer.loader(batches=10))
    at = trainer.events[5].t0
    for flags in (0, 1, 2, 3):
        trainer.note(Kind.COPY, at, at + 10 * US, 1000, flags)
    facts = facts_of(trainer)["train.py:10"]
    assert facts.copy_bytes == 4000
    assert (facts.num_pageable_copies, facts.num_blocking_copies) == (2, 2)
    assert facts.copy_ns == 30 * US


@pytest.mark.parametrize("asked", [False, True])
def test_the_trainers_run_queue_wait_is_that_of_its_bodies(asked):
    """What a long wait says of its own time in the run queue is not laid on the step's body."""
    trainer = Trainer(body_on_cpu_frac=0.0)
    slow = Service(on_cpu_ns=20 * MS, run_queue_ns=0, blocked_ns=0)
    loader = trainer.loader(site="t.py:1", num_workers=2, batches=40, fetch=lambda _: slow)
    for _ in loader:
        trainer.body(5 * MS, run_queue_ns=2 * MS)
    if asked:  # it stood in the run queue in no wait: all of the time that the kernel counted is the bodies'
        trainer.events = [
            event._replace(c=1 << NEXT_QUEUED_SHIFT) if event.kind == Kind.NEXT and not event.c else event
            for event in trainer.events
        ]
    facts = facts_of(trainer)["t.py:1"]
    assert facts.body_run_queue_frac == pytest.approx(0.4 if asked else 0.4 * 5 / 10, abs=0.06)
