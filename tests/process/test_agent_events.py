"""The agent sees everything: each batch by its events, each loader by its line and role, also without a DataLoader."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.records.rundir import NONE, EventKind
from headrace.run.gather import gather
from tests.process.agent_programs import watch

pytestmark = pytest.mark.slow


def line_of(program, mark):
    """``file:line`` of the line with a mark in it."""
    lines = (watch.HERE / program).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if mark in line]
    return f"{program}:{number}"


class TestCounted:
    """Two epochs of five batches of four samples."""

    @pytest.fixture(scope="class", params=["0 none", "2 fork", "1 forkserver"])
    def counted(self, request, tmp_path_factory):
        words = request.param.split()
        return int(words[0]), watch.with_agent(tmp_path_factory.mktemp("counted"), "counted.py", *words)

    def test_trainer(self, counted):
        """12 next() of which 2 end an epoch, 10 receptions, 10 backwards, 10 optimizer steps, 2 epochs."""
        workers, done = counted
        assert (done.code, done.errors) == (0, [])
        count = {kind: len(done.trainer.of(kind)) for kind in EventKind}
        assert (count[EventKind.NEXT], count[EventKind.EPOCH]) == (12, 2)
        assert (count[EventKind.BACKWARD], count[EventKind.OPTIMIZER]) == (10, 10)
        assert count[EventKind.RECV] == (10 if workers else 0)
        assert [event.c for event in done.trainer.of(EventKind.NEXT)] == [0, 0, 0, 0, 0, 1] * 2
        assert [event.b for event in done.trainer.of(EventKind.NEXT)] == [0, 1, 2, 3, 4, 5] * 2

    def test_keys_match(self, counted):
        """Every delivered batch has one NEXT, RECV, FETCH and TASK with the same epoch and number."""
        workers, done = counted
        fetching = [trace for trace in done.traces if trace.is_worker] if workers else [done.trainer]
        fetches = [event for trace in fetching for event in trace.of(EventKind.FETCH)]
        assert len(fetches) == 10
        assert {event.a for event in fetches} == set(range(1, workers + 1) if workers else [0])
        if not workers:
            assert {event.b for event in fetches} == {NONE}
            return
        tasks = Counter((event.c, event.b) for trace in fetching for event in trace.of(EventKind.TASK))
        received = Counter((event.c, event.b) for event in done.trainer.of(EventKind.RECV))
        delivered = [event.e for event in done.trainer.of(EventKind.NEXT) if not event.c]
        assert tasks == received == Counter((epoch, number) for epoch in (0, 1) for number in range(5))
        assert delivered == list(range(5)) * 2
        assert sorted(event.b for event in fetches) == sorted(delivered)

    def test_order_in_time(self, counted):
        """On the one clock: index received, fetched, handed over, received by the trainer, delivered."""
        workers, done = counted
        if not workers:
            return
        tasks = {(e.c, e.b): e for trace in done.traces for e in trace.of(EventKind.TASK)}
        fetches = {(e.a, e.t0): e for trace in done.traces for e in trace.of(EventKind.FETCH)}
        for received in done.trainer.of(EventKind.RECV):
            task = tasks[received.c, received.b]
            assert any(e.a == task.a and task.t0 <= e.t0 <= e.t1 <= task.t1 for e in fetches.values())
            assert task.t0 < received.t1

    def test_sizes(self, counted):
        """A batch of 4 x 6 float32 is one tensor of 96 bytes; a fetch is of four samples."""
        _, done = counted
        events = [event for trace in done.traces for event in trace.of(EventKind.TASK)]
        assert {(event.d, event.e) for event in events} <= {(96, 1)}
        samples = [event for trace in done.traces for event in trace.of(EventKind.SAMPLE)]
        assert {event.d for event in samples} == {4}

    def test_described(self, counted):
        """The loader's settings are in the record."""
        workers, done = counted
        (line,) = done.trainer.lines("loader")
        told = {"num_workers": workers, "batch_size": 4, "persistent_workers": workers > 0}
        told |= {"iterable": False, "guard": True}
        assert told.items() <= line.items()
        assert line["dataset"] == "__main__.Numbers"


class TestLoops:
    """Loaders by line and role."""

    #: mark -> (role, iterators, steps)
    KNOWN = {
        "# site: anew": ("train", 3, 6),
        "# site: endless": ("train", 1, 9),
        "# site: accumulate": ("train", 1, 8),
        "# site: between, training": ("train", 2, 12),
        "# site: between, validation": ("validation", 2, 6),
        "# site: inside, training": ("train", 1, 6),
        "# site: inside, validation": ("validation", 2, 6),
        "# site: zip, one": ("train", 1, 6),
        "# site: zip, two": ("train", 1, 6),
    }

    @pytest.fixture(scope="class")
    def loops(self, tmp_path_factory):
        return watch.with_agent(tmp_path_factory.mktemp("loops"), "loops.py")

    @pytest.mark.parametrize("mark", KNOWN)
    def test_known(self, loops, mark):
        """Named by the innermost line outside installed packages; steps, iterators and role are right."""
        view = loops.views[line_of("loops.py", mark)]
        assert (view.role, len(view.iter_ids), len(view.steps)) == self.KNOWN[mark]

    def test_no_others(self, loops):
        """There are no other loaders, and nothing failed."""
        assert len(loops.views) == len(self.KNOWN)
        assert (loops.code, loops.err, loops.errors) == (0, "", [])


class TestWithoutLoader:
    """Programs that make their batches themselves."""

    def test_stacks(self, tmp_path):
        """Sampled stacks name the line of get_batch, and the run has a finding."""
        done = watch.with_agent(tmp_path, "loaderless.py", "get_batch", "2")
        assert (done.code, done.errors) == (0, [])
        record = gather(done.run_dir)
        assert record.finding is not None
        hotspot = record.processes[0].loaders[0].hotspots[0]
        assert hotspot.function == "get_batch"
        assert hotspot.site == line_of("loaderless.py", "# the slow store")

    @pytest.mark.parametrize("name", ["get_batch", "stream", "Feed", "feed", "source", "Source.read", "Source.make"])
    def test_data(self, tmp_path, name):
        """--data takes a function, generator function, class, object, static and class method of the script."""
        kind = name.rsplit(".", 1)[-1]
        done = watch.with_agent(tmp_path, "loaderless.py", kind, "0", HEADRACE_DATA=f"loaderless:{name}")
        assert (done.code, done.out, done.errors) == (0, "ok 5\n", [])
        assert len(done.trainer.of(EventKind.CALL)) == 5

    def test_data_in_a_module(self, tmp_path):
        """--data of a module that the script imports."""
        (tmp_path / "feeding.py").write_text("import torch\ndef get():\n    return torch.ones(2)\n")
        program = tmp_path / "train.py"
        program.write_text(
            "import feeding, torch\n"
            "weight = torch.nn.Parameter(torch.ones(2))\n"
            "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
            "for _ in range(4):\n    (feeding.get() * weight).sum().backward()\n    optimizer.step()\n"
        )
        done = watch.with_agent(tmp_path, program, HEADRACE_DATA="feeding:get")
        assert (done.code, done.errors) == (0, [])
        assert len(done.trainer.of(EventKind.CALL)) == 4
