"""Steps, passes and roles of loaders, from the events of one trainer."""

from __future__ import annotations

import pytest

from headrace.core.events import Event, EventFile, Trace
from headrace.core.timeline import loader_views
from headrace.records import rundir as f
from tests.unit.synth import MS, US, Kind, Service, Trainer

QUICK = Service(on_cpu_ns=1 * MS)


def views_of(trainer):
    return {view.site: view for view in loader_views(trainer.trace())}


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_steps_follow_each_other_without_a_gap(num_workers, persistent):
    """A pass is a chain of steps: each begins where the one before ended; only a first one is not steady."""
    trainer = Trainer()
    trainer.train(trainer.loader(num_workers=num_workers, persistent_workers=persistent, batches=9), epochs=3)
    (view,) = loader_views(trainer.trace())
    assert [len(one.steps) for one in view.passes] == [9, 9, 9]
    for one in view.passes:
        assert [step.first for step in one.steps] == [True] + [False] * 8
        assert all(a.end == b.wait0 for a, b in zip(one.steps, one.steps[1:], strict=False))
        assert one.steps[-1].end + one.stop_ns == one.end
        assert one.begin + one.iter_ns <= one.steps[0].wait0
    assert all(step.body_ns == 10 * MS for step in view.steps)
    assert len(view.steady) == 24


def test_persistent_workers_resume_and_others_start_again():
    """A batch number is told apart by iterator and by how often the iterator was resumed."""
    trainer = Trainer()
    trainer.train(trainer.loader(num_workers=2, persistent_workers=True, batches=3), epochs=3)
    trainer.train(trainer.loader(site="b.py:1", num_workers=2, batches=3), epochs=3)
    views = views_of(trainer)
    assert {step.resumes for step in views["train.py:10"].steps} == {0, 1, 2}
    assert {step.resumes for step in views["b.py:1"].steps} == {0}
    assert len(views["train.py:10"].iter_ids) == 1
    assert len(views["b.py:1"].iter_ids) == 3


def test_a_loader_made_anew_in_every_epoch_is_one():
    """Loaders made at one site belong together."""
    trainer = Trainer()
    for _ in range(4):
        trainer.train(trainer.loader(batches=5))
    (view,) = loader_views(trainer.trace())
    assert len(view.passes) == 4
    assert len(view.steps) == 20


def test_validation_is_the_loop_without_a_backward_and_comes_last():
    """The validation loader is told from the training loader, even where it costs more."""
    trainer = Trainer()
    train = trainer.loader(site="t.py:1", fetch=QUICK)
    held_out = trainer.loader(site="v.py:1", fetch=Service(on_cpu_ns=50 * MS))
    for _ in range(2):
        trainer.train(train)
        trainer.train(held_out, backward=False)
    views = loader_views(trainer.trace())
    assert [(view.site, view.role) for view in views] == [("t.py:1", "train"), ("v.py:1", "validation")]


def test_a_loop_without_any_backward_has_no_role():
    """Inference alone is neither training nor validation."""
    trainer = Trainer()
    trainer.train(trainer.loader(), backward=False)
    assert [view.role for view in loader_views(trainer.trace())] == ["unknown"]


def test_gradient_accumulation_keeps_one_batch_a_step_and_the_role():
    """With an optimizer step and a backward in every fourth batch only, steps stay batches and training is training."""
    trainer = Trainer()
    for number in trainer.loader(batches=40):
        trainer.body(5 * MS, backward=number % 4 == 3)
    (view,) = loader_views(trainer.trace())
    assert view.role == "train"
    assert len(view.steps) == 40


def test_both_loaders_of_a_zip_are_training():
    """Two loaders read in one step share its backward: both train."""
    trainer = Trainer()
    pairs = zip(trainer.loader(site="a.py:1"), trainer.loader(site="b.py:1"), strict=True)
    for _ in pairs:
        trainer.body(10 * MS)
    assert {view.site: view.role for view in loader_views(trainer.trace())} == {"a.py:1": "train", "b.py:1": "train"}


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_validation_loop_left_by_break_stays_validation(num):
    """A sanity check of few batches ends where training goes on: the backward that follows is not its own."""
    trainer = Trainer()
    held_out = trainer.loader(site="v.py:1", batches=40, fetch=QUICK)
    for number in held_out:
        trainer.body(3 * MS, backward=False)
        if number == num - 1:
            break
    trainer.train(trainer.loader(site="t.py:1", fetch=QUICK))
    views = views_of(trainer)
    assert views["v.py:1"].role == "validation"
    assert views["t.py:1"].role == "train"
    assert views["v.py:1"].end < views["t.py:1"].begin + 1 * MS


def test_the_last_body_of_a_loop_left_by_break_ends_with_its_optimizer():
    """A training loop left by break keeps its last body up to the optimizer's end."""
    trainer = Trainer()
    for number in trainer.loader(batches=40):
        trainer.body(10 * MS)
        if number == 7:
            break
    (view,) = loader_views(trainer.trace())
    assert len(view.steps) == 8
    assert view.steps[-1].body_ns == pytest.approx(10 * MS, abs=10 * US)


def test_an_iterator_without_an_epoch_event_is_seen_from_its_first_batch():
    """An iterator older than the hooks has no start: all its steps are steady."""
    trainer = Trainer()
    trainer.train(trainer.loader(batches=6))
    trainer.events = [event for event in trainer.events if event.kind != Kind.EPOCH]
    (view,) = loader_views(trainer.trace())
    assert len(view.steady) == 6
    assert view.passes[0].iter_ns == 0


def test_events_of_no_known_loader_are_left_alone():
    """Batches of an iterator whose line was lost, broken lines and unknown kinds raise nothing."""
    trainer = Trainer()
    trainer.train(trainer.loader(batches=6))
    trainer.meta = [{}, {"k": "iter"}, {"k": "loader"}, {"k": "iter", "iter": 99}, {"k": "what"}]
    trainer.note(Kind.NEXT, trainer.now, trainer.now, 99, 0, 0, f.NONE, f.NONE)
    (view,) = loader_views(trainer.trace())
    assert view.site == "?"
    assert view.steps[0].wait_ns == 0
    assert view.steps[0].main_on_cpu_ns == 0


def test_stall_is_what_the_device_idled_of_the_wait():
    """With a device's clock the stall is its idle time, at most the wait; without a reading it is the wait."""
    trainer = Trainer()
    trainer.train(trainer.loader(batches=4, fetch=QUICK))
    nexts = [event for event in trainer.events if event.kind == Kind.NEXT and not event.c & f.NEXT_STOP]
    for event, idle in zip(nexts, (0, 300 * US, 10**12, f.NONE), strict=True):
        trainer.note(Kind.DEVICE, event.t1 + 1, event.t1 + 1, event.a, event.b, idle)
    (view,) = loader_views(trainer.trace())
    wait = view.steps[0].wait_ns
    assert [step.stall_ns for step in view.steps] == [0, 300 * US, wait, wait]
    assert view.steps[3].idle_ns is None


def test_calls_of_a_named_function_are_steps():
    """``--data`` makes each call a step; a named function has no epochs."""
    lines = [{"k": "loader", "loader": 1, "site": "m:f", "call": True}, {"k": "iter", "iter": 1, "loader": 1}]
    calls = [Event(int(Kind.CALL), i * 10, i * 10 + 4, 1, 0, 0, 0, 0) for i in range(5)]
    (view,) = loader_views(Trace({"pid": 1}, lines, EventFile(1, 0, 0, calls, 0)))
    assert view.is_call
    assert [step.wait_ns for step in view.steps] == [4] * 5
    assert [step.body_ns for step in view.steps] == [6, 6, 6, 6, 0]


def test_an_error_in_next_is_no_step():
    """A fetch that raised delivered nothing; what follows is not lost."""
    trainer = Trainer()
    trainer.train(trainer.loader(batches=3))
    at = next(i for i, event in enumerate(trainer.events) if event.kind == Kind.NEXT and event.b == 1)
    trainer.events[at] = trainer.events[at]._replace(c=f.NEXT_ERROR)
    (view,) = loader_views(trainer.trace())
    assert len(view.steps) == 2
