"""Each slice of a wait is charged to the place where the awaited batch was."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.attribution import PLACES, Task, TaskIndex, queued_behind, split_wait, worker_tasks
from headrace.core.timeline import Step, loader_views
from headrace.records import rundir as f
from tests.unit.synth import MS, US, Kind, Service, Trainer

moment = st.integers(0, 10_000)
maybe = st.none() | moment
tasks_any = st.builds(
    Task, pid=st.just(1), resumes=st.just(0), idx=st.just(0), got=moment, fetch0=moment, fetch1=moment, put=moment,
    collate_ns=moment, on_cpu_ns=moment, run_queue_ns=maybe, recv0=maybe, recv1=maybe, pin0=maybe, pin1=maybe,
)  # fmt: skip


def a_step(wait0, wait1):
    return Step(1, 0, 0, wait0, wait1, wait1 + 1, False, 0, 0)


@settings(deadline=None, max_examples=150)
@given(st.none() | tasks_any, moment, moment, st.booleans())
def test_the_parts_of_a_wait_sum_to_it(task, one, other, pin):
    """For any order of timestamps the parts are not negative and sum to the wait exactly."""
    step = a_step(min(one, other), max(one, other))
    parts = split_wait(step, task, pin)
    assert sum(parts.values()) == step.wait_ns
    assert min(parts.values()) >= 0
    assert set(parts) == set(PLACES)


@settings(deadline=None, max_examples=50)
@given(st.lists(tasks_any, max_size=5), tasks_any, moment, moment)
def test_the_parts_of_a_queue_sum_to_the_time_in_it(tasks, task, one, other):
    """What a worker did while a batch queued adds up to the queueing inside the wait, if its fetches do not overlap."""
    step = a_step(min(one, other), max(one, other))
    at = 0
    for i, before in enumerate(sorted(tasks, key=lambda t: t.fetch0)):
        fetch0 = max(before.fetch0, at)
        at = max(before.fetch1, fetch0)
        tasks[i] = dataclasses.replace(before, fetch0=fetch0, fetch1=at, collate_ns=min(before.collate_ns, at - fetch0))
    parts = queued_behind(step, task, tasks)
    inside = max(min(task.fetch0, step.wait1) - step.wait0, 0)
    assert min(parts.values()) >= 0
    if all(before.fetch1 <= task.fetch0 or before.fetch0 >= task.fetch0 for before in tasks):
        assert sum(parts.values()) == inside


def test_each_stage_gets_its_own_time():
    """A batch awaited from queue to pin shows each of its stages with the time that was in the wait."""
    task = Task(
        pid=1, resumes=0, idx=0, got=90, fetch0=100, fetch1=200, put=205, collate_ns=30, on_cpu_ns=0, run_queue_ns=0,
        recv0=300, recv1=310, pin0=230, pin1=260,
    )  # fmt: skip
    parts = split_wait(a_step(80, 320), task, pin=True)
    expected = {"queued": 20, "fetch": 70, "collate": 30, "transport": 50, "pin": 30, "reorder": 40, "unseen": 0}
    assert parts == expected
    assert split_wait(a_step(150, 180), task, pin=True)["fetch"] == 20


def test_a_batch_of_an_unseen_worker_is_unseen():
    """Without the worker's side nothing is claimed."""
    assert split_wait(a_step(5, 9), None, pin=False)["unseen"] == 4


def index_of(trainer, view, leave_out=()):
    workers = {process.pid: process.trace() for process in trainer.workers if process.pid not in leave_out}
    return TaskIndex(trainer.trace(), workers, view)


@pytest.mark.parametrize("persistent", [False, True])
def test_every_step_finds_its_own_batch(persistent):
    """Batch numbers come again in each epoch; each step gets the fetch that came right before it."""
    trainer = Trainer()
    loader = trainer.loader(num_workers=3, persistent_workers=persistent, batches=7, pin_ns=20 * US)
    trainer.train(loader, epochs=70)
    (view,) = loader_views(trainer.trace())
    index = index_of(trainer, view)
    found = [index.of(step) for step in view.steps]
    assert all(task is not None for task in found)
    assert len({id(task) for task in found}) == len(view.steps) == 490
    for step, task in zip(view.steps, found, strict=True):
        assert task.fetch1 <= task.recv1 <= step.wait1
        assert task.fetch1 <= task.pin0 < task.pin1 <= task.recv1


def test_without_workers_the_batch_is_found_by_time():
    """With num_workers=0 the fetch inside the wait is the step's own, validation's fetches are not."""
    trainer = Trainer()
    train, held_out = trainer.loader(batches=5), trainer.loader(site="v.py:1", batches=5)
    for _ in train:
        trainer.body(5 * MS)
        trainer.train(held_out, backward=False)
    for view in loader_views(trainer.trace()):
        index = index_of(trainer, view)
        for step in view.steps:
            task = index.of(step)
            assert task is not None
            assert step.wait0 <= task.fetch0 <= task.fetch1 <= step.wait1


def test_a_missing_worker_leaves_its_batches_unseen():
    """Batches of a worker that left no file have no task; those of the others do."""
    trainer = Trainer()
    trainer.train(trainer.loader(num_workers=2, batches=10))
    (view,) = loader_views(trainer.trace())
    index = index_of(trainer, view, leave_out={trainer.workers[0].pid})
    assert [index.of(step) is None for step in view.steps] == [True, False] * 5


def test_fetches_without_their_companions_still_count():
    """A worker killed between fetch and hand-over leaves a task whose unknown values are None, not numbers."""
    trainer = Trainer()
    trainer.train(trainer.loader(num_workers=1, batches=4, fetch=Service(on_cpu_ns=2 * MS, blocked_ns=3 * MS)))
    worker = trainer.workers[0]
    worker.events = [event._replace(e=f.NONE) for event in worker.events if event.kind == Kind.FETCH]
    tasks = worker_tasks(worker.trace())
    assert len(tasks) == 4
    assert tasks[0].num_bytes is None
    assert tasks[0].run_queue_ns is None
    assert tasks[0].blocked_ns == 3 * MS


def test_values_that_were_not_measured_are_not_numbers():
    """NONE in any field neither makes a CPU time longer than the fetch nor a size of 16 EiB."""
    trainer = Trainer()
    trainer.train(trainer.loader(num_workers=1, batches=4))
    worker = trainer.workers[0]
    worker.events = [
        event._replace(c=f.NONE if event.kind != Kind.TASK else 0, d=f.NONE, e=f.NONE) for event in worker.events
    ]
    for task in worker_tasks(worker.trace()):
        assert task.on_cpu_ns <= task.fetch1 - task.fetch0
        assert task.process_cpu_ns <= task.fetch1 - task.fetch0
        assert task.fetch_ns == 0
        assert task.num_bytes is None
        assert task.slowest_index is None
