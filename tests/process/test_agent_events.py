"""The agent sees everything: each batch by its events, each loader by its line and role, also without a DataLoader."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.records.rundir import NEXT_ERROR, NEXT_QUEUED_SHIFT, NEXT_STOP, NONE, EventKind
from headrace.run.gather import gather
from tests.process.agent_programs import watch

pytestmark = pytest.mark.slow


def line_of(program, mark):
    """``file:line`` of the line with a mark in it."""
    lines = (watch.HERE / program).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if mark in line]
    return f"{program}:{number}"


class Place:
    """What is recorded of the loader with so many workers: the events of its iterators, the traces of its workers."""

    def __init__(self, done, workers):
        (self.info,) = [line for line in done.trainer.lines("loader") if line["num_workers"] == workers]
        lines = [line for line in done.trainer.lines("iter") if line["loader"] == self.info["loader"]]
        self.iter_ids, self.num_workers, self.trainer = [line["iter"] for line in lines], workers, done.trainer
        pids = [pid for line in lines for pid in line["workers"]]
        self.fetching = [trace for trace in done.traces if trace.pid in pids] if workers else [done.trainer]

    def of(self, kind):
        return [event for event in self.trainer.of(kind) if event.a in self.iter_ids]

    def fetched(self, kind):
        return [event for trace in self.fetching for event in trace.of(kind)]


class TestCounted:
    """Two epochs of five batches of four samples: without workers, with two forked, with one of a fork server."""

    PLACES = ("0:none", "2:fork", "1:forkserver")

    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory):
        return watch.with_agent(tmp_path_factory.mktemp("counted"), "counted.py", *self.PLACES)

    @pytest.fixture(params=[0, 2, 1])
    def place(self, request, done):
        return Place(done, request.param)

    def test_trainer(self, done):
        """10 backwards and 10 optimizer steps in each place, and no failure in the agent."""
        assert (done.code, done.err, done.errors) == (0, "", [])
        assert [len(done.trainer.of(kind)) for kind in (EventKind.BACKWARD, EventKind.OPTIMIZER)] == [30, 30]

    def test_deliveries(self, place):
        """12 next() of which 2 end an epoch, 2 epochs, and with workers 10 receptions."""
        assert [event.b for event in place.of(EventKind.NEXT)] == [0, 1, 2, 3, 4, 5] * 2
        assert [event.c & (NEXT_STOP | NEXT_ERROR) for event in place.of(EventKind.NEXT)] == [0, 0, 0, 0, 0, 1] * 2
        # One iterator that is used again where workers persist, otherwise one each.
        assert [event.d for event in place.of(EventKind.EPOCH)] == ([0, 1] if place.num_workers else [0, 0])
        assert len(place.iter_ids) == (1 if place.num_workers else 2)
        assert len(place.of(EventKind.RECV)) == (10 if place.num_workers else 0)

    def test_keys_match(self, place):
        """Every delivered batch has one NEXT, RECV, FETCH and TASK with the same epoch and number."""
        fetches = place.fetched(EventKind.FETCH)
        assert len(fetches) == 10
        assert {event.a for event in fetches} == set(range(1, place.num_workers + 1) or [0])
        if not place.num_workers:
            assert {event.b for event in fetches} == {NONE}
            return
        tasks = Counter((event.c, event.b) for event in place.fetched(EventKind.TASK))
        received = Counter((event.c, event.b) for event in place.of(EventKind.RECV))
        delivered = [event.e for event in place.of(EventKind.NEXT) if not event.c & NEXT_STOP]
        assert tasks == received == Counter((epoch, number) for epoch in (0, 1) for number in range(5))
        assert delivered == list(range(5)) * 2
        assert sorted(event.b for event in fetches) == sorted(delivered)

    @pytest.mark.parametrize("workers", [1, 2])
    def test_order_in_time(self, done, workers):
        """On the one clock: index received, fetched, handed over, received by the trainer."""
        place = Place(done, workers)
        tasks = {(event.c, event.b): event for event in place.fetched(EventKind.TASK)}
        for received in place.of(EventKind.RECV):
            task = tasks[received.c, received.b]
            inside = [e for e in place.fetched(EventKind.FETCH) if e.a == task.a and task.t0 <= e.t0 <= e.t1 <= task.t1]
            assert [event.b for event in inside] == [task.b]
            assert task.t0 < received.t1

    def test_sizes(self, place):
        """A batch of 4 x 6 float32 is one tensor of 96 bytes; a fetch is of four samples."""
        sizes = {(event.d, event.e) for event in place.fetched(EventKind.TASK)}
        assert sizes == ({(96, 1)} if place.num_workers else set())
        assert {event.d for event in place.fetched(EventKind.SAMPLE)} == {4}

    def test_described(self, place):
        """The loader's settings are in the record."""
        told = {"batch_size": 4, "persistent_workers": place.num_workers > 0, "iterable": False, "guard": True}
        assert told.items() <= place.info.items()
        assert place.info["dataset"] == "__main__.Numbers"
        assert place.info["start_method"] in ("fork", "forkserver")


class TestFields:
    """What the fields of single events say, in loops made for it."""

    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory):
        return watch.with_agent(tmp_path_factory.mktemp("fields"), "fields.py")

    def at(self, done, mark, kind=EventKind.NEXT):
        (info,) = [line for line in done.trainer.lines("loader") if line["site"].endswith(line_of("fields.py", mark))]
        ids = [line["iter"] for line in done.trainer.lines("iter") if line["loader"] == info["loader"]]
        key = "b" if kind == EventKind.EPOCH else "a"
        wanted = [info["loader"]] if kind == EventKind.EPOCH else ids
        events = [event for event in done.trainer.of(kind) if getattr(event, key) in wanted]
        return [event for event in events if kind != EventKind.NEXT or not event.c & NEXT_STOP]

    def test_long_waits_tell_of_themselves(self, done):
        """CPU and run-queue time of next() are there while batches are awaited, and those of iter()."""
        assert (done.code, done.errors) == (0, [])
        for event in self.at(done, "# site: waits")[1:]:
            assert event.c >> NEXT_QUEUED_SHIFT
            assert event.d < event.t1 - event.t0
        (epoch,) = self.at(done, "# site: waits", EventKind.EPOCH)
        assert epoch.e < epoch.t1 - epoch.t0

    def test_ready_batches_cost_no_system_call(self, done):
        """Where batches are ready, no clock but the monotonic one is asked."""
        ready = self.at(done, "# site: ready")
        assert len(ready) == 40
        assert sum(event.d == NONE and not event.c for event in ready) >= 20

    def test_every_backward_is_there(self, done):
        """Accumulated ones, the one before the optimizer's step, and one that no step follows."""
        backwards, steps = done.trainer.of(EventKind.BACKWARD), done.trainer.of(EventKind.OPTIMIZER)
        assert (len(backwards), len(steps)) == (30 + 40 + 1, 10 + 40)
        assert all(event.t0 < event.t1 for event in backwards)
        assert {event.t0 for event in steps} <= {event.t1 for event in backwards}

    def test_batches_in_any_order_keep_their_number(self, done):
        """Out of order, a delivery names the batch that was received, not the one that torch waits for."""
        received = [event.b for event in self.at(done, "# site: any order", EventKind.RECV)]
        assert [event.e for event in self.at(done, "# site: any order")] == received
        assert received[0] != 0


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
        done = watch.with_agent(tmp_path, "loaderless.py", "2")
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
        done = watch.with_agent(tmp_path, "fake_loaderless.py", kind, HEADRACE_DATA=f"fake_loaderless:{name}")
        assert (done.code, done.out, done.err, done.errors) == (0, "ok\n", "", [])
        assert len(done.trainer.of(EventKind.CALL)) == 5

    def test_data_in_a_module(self, tmp_path):
        """--data of a module that the script imports."""
        done = watch.with_agent(tmp_path, "fake_loaderless.py", "shuffle", HEADRACE_DATA="shuffling:shuffle")
        assert (done.code, done.out, done.errors) == (0, "ok\n", [])
        assert len(done.trainer.of(EventKind.CALL)) == 5
