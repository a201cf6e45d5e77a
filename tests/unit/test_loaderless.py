"""Loops without any DataLoader are judged by what sampled stacks show between optimizer steps."""

from __future__ import annotations

import pytest

from headrace.core import loaderless
from headrace.core.analyse import Observed
from headrace.core.events import Event, EventFile, Trace
from headrace.records.run import Process, Run
from tests.unit.synth import MS, ZERO_NS, Kind

MODEL = ["a/torch/nn/modules/module.py:1750|Module._call_impl", "*gpt.py:90|train"]
DATA = ["a/numpy/_core/memmap.py:9|memmap", "*gpt.py:31|get_batch", "*gpt.py:90|train"]


def judged(num_steps=50, rows=(), lines=None):
    steps = [
        Event(int(Kind.OPTIMIZER), ZERO_NS + i * 20 * MS, ZERO_NS + i * 20 * MS + 5, 0, 0, 0, 0, 0)
        for i in range(num_steps)
    ]
    meta = [{"k": "stacks", "fetch": False, "rows": [list(row) for row in rows]}] if lines is None else lines
    trace = Trace({"pid": 5}, meta, EventFile(5, 0, 0, steps, 0))
    run = Run(headrace="0", command=[], ended="exit", processes=[Process(pid=5)])
    loaderless.add(run, Observed([trace], [], None, ZERO_NS))
    return run


def test_the_function_between_the_steps_is_named():
    """A get_batch that runs on a core for half of the time is preprocessing, with its line and a bounded gain."""
    run = judged(rows=[(50, "running", DATA), (50, "running", MODEL)])
    (loader,) = run.processes[0].loaders
    assert loader.kind == "stacks"
    assert loader.site == "gpt.py:31"
    assert loader.stall_frac == pytest.approx(0.5)
    assert loader.step_ns.mean == pytest.approx(20 * MS)
    assert run.finding.cause == "preprocess"
    assert run.finding.changes[0].speedup == pytest.approx(2.0)
    assert "get_batch" in run.finding.changes[0].line
    times = loader.time_frac
    assert sum(getattr(times, name) for name in times.__struct_fields__) == pytest.approx(1)


def test_a_function_that_waits_for_a_file_is_storage():
    """Blocked samples make it storage."""
    run = judged(rows=[(50, "file:nfs", DATA), (50, "running", MODEL)])
    assert run.finding.cause == "storage"
    assert run.finding.runner_up.cause == "preprocess"


def test_a_loop_in_its_model_is_compute():
    """Below a tenth of the samples outside model, backward and optimizer nothing is to gain from data."""
    assert judged(rows=[(5, "running", DATA), (95, "running", MODEL)]).finding.cause == "compute"


@pytest.mark.parametrize("rows", [[(99, "running", DATA)], [(99, "socket", [])], [(99, "lock", ["?"])]])
def test_a_loop_that_is_never_in_its_model_has_a_finite_gain(rows):
    """Even if no sample at all was in the model, the promised speed-up is a number."""
    change = judged(rows=rows).finding.changes[0]
    assert change.speedup_ci[0] <= change.speedup <= change.speedup_ci[1] <= 20.1


@pytest.mark.parametrize("rows", [[], [(3, "running", DATA)]])
def test_too_few_samples_are_unknown(rows):
    """Without stacks, or with a handful, the answer says what would tell more."""
    finding = judged(rows=rows).finding
    assert finding.cause == "unknown"
    assert "--data" in finding.separate_with


def test_a_program_of_a_few_steps_is_left_alone():
    """A handful of optimizer steps is no training loop."""
    run = judged(num_steps=3)
    assert run.finding is None
    assert run.processes[0].loaders == []


def test_a_loop_with_a_loader_is_left_to_it():
    """Where a loader was iterated, stacks between the steps are not needed."""
    trace = Trace({"pid": 5}, [], EventFile(5, 0, 0, [Event(int(Kind.NEXT), 1, 2, 0, 0, 0, 0, 0)], 0))
    run = Run(headrace="0", command=[], ended="exit", processes=[Process(pid=5)])
    loaderless.add(run, Observed([trace], [], None, 0))
    assert run.finding is None


def test_stacks_of_fetches_are_not_between_steps():
    """Looks at a fetching thread do not say what runs between optimizer steps."""
    lines = [{"k": "stacks", "fetch": True, "rows": [[90, "running", DATA]]}, {"k": "stacks"}, {}]
    assert judged(lines=lines).finding.cause == "unknown"


def test_a_clock_that_stands_still_raises_nothing():
    """Optimizer steps at one moment have no length, and no error."""
    steps = [Event(int(Kind.OPTIMIZER), 7, 7, 0, 0, 0, 0, 0)] * 20
    run = Run(headrace="0", command=[], ended="exit", processes=[Process(pid=5)])
    loaderless.add(run, Observed([Trace({"pid": 5}, [], EventFile(5, 0, 0, steps, 0))], [], None, 0))
    assert run.processes[0].loaders[0].step_ns.mean == 0
