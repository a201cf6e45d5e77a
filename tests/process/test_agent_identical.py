"""A program that is watched does what it does alone: batches, losses, exceptions, output and exit code are the same."""

from __future__ import annotations

import pytest

from tests.process.agent_programs import watch

pytestmark = pytest.mark.slow
#: Those of scenarios.py. (Importing it would import torch here.)
ALWAYS = (
    "map", "iterable", "liar", "batch_sampler", "no_batches", "dicts", "points", "getitems", "error", "broken_off",
    "pinned",
)  # fmt: skip
WITH_WORKERS = ("persistent", "any_order", "iterable", "no_batches", "points", "getitems", "error", "broken_off")
OTHER_METHODS = ("persistent", "points")
#: Workers under spawn import torch once each: one loader with persistent workers is enough.
GROUPS = (["fork:0"], ["fork:2/" + ",".join(WITH_WORKERS), "spawn:1/persistent", "forkserver:1/points"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every scenario, once bare and once under ``headrace run``."""
    tmp_path = tmp_path_factory.mktemp("scenarios")
    both = (watch.bare, watch.under_headrace)
    return [tuple(start(tmp_path, "scenarios.py", *words) for start in both) for words in GROUPS]


def scenario_names():
    return [(0, name) for name in ALWAYS] + [(1, name) for name in WITH_WORKERS]


@pytest.mark.parametrize(("group", "name"), scenario_names())
def test_same_batches(runs, group, name):
    """Every byte of every batch in order, the losses, the iterator's type, its workers and what it raised are equal."""
    alone, watched = ([line for line in done.lines if line["name"] == name] for done in runs[group])
    assert watched == alone
    assert len(alone) == (2 if group and name in OTHER_METHODS else 1)
    assert all(len(line["hashes"]) >= 4 for line in alone)


def test_same_ending(runs):
    """Exit code, sys.path, argv, everything printed (also what an iterator's end prints, and when) are equal."""
    for alone, watched in runs:
        assert (watched.code, watched.lines) == (alone.code, alone.lines)
        assert alone.code == 3
        # Workers of one loader end in any order, and so do their words.
        assert sorted(watched.out.splitlines()) == sorted(alone.out.splitlines())
    assert runs[0][1].out == runs[0][0].out


def test_same_warnings(runs):
    """stderr is equal to the letter: warnings name the same lines, the user's filters apply, no new ones come."""
    alone, watched = runs[0]
    assert watched.err == alone.err
    assert "headrace" not in watched.err


def test_nothing_went_wrong_inside(runs):
    """The agent hooked everything and none of its parts failed."""
    assert [watched.errors for _, watched in runs] == [[], []]


class TestOdd:
    """Programs that do more than train."""

    NAMES = ("names", "descriptors", "forks", "commands", "threads", "daemon")

    @pytest.fixture(scope="class")
    def odd(self, tmp_path_factory):
        tmp_path = tmp_path_factory.mktemp("odd")
        return watch.bare(tmp_path, "odd.py", *self.NAMES), watch.with_agent(tmp_path, "odd.py", *self.NAMES)

    def saw(self, odd, name):
        return [next(line["saw"] for line in done.lines if line["name"] == name) for done in odd]

    @pytest.mark.parametrize("name", ["names", "forks", "commands", "threads", "daemon"])
    def test_same(self, odd, name):
        """Two threads, a pool and commands in a dataset, a forked child, a thread at exit, torch's names: as alone."""
        alone, watched = self.saw(odd, name)
        assert watched == alone

    def test_end(self, odd):
        """They end alike, and nothing of the agent failed."""
        assert odd[0][0:3:2] == odd[1][0:3:2] == (0, "")
        assert odd[1].errors == []

    def test_descriptors(self, odd):
        """At most three more descriptors, in trainer and workers, and no thread while nothing is sampled."""
        (here, workers, _), (here_watched, workers_watched, _) = self.saw(odd, "descriptors")
        assert here_watched[0] - here[0] <= 3
        assert here_watched[1] == here[1]
        for alone, watched in zip(workers, workers_watched, strict=True):
            assert watched[0] - alone[0] <= 3

    def test_forks_write_their_own(self, odd):
        """A child of os.fork has a record of its own, in which its loader is described."""
        traces = [trace for trace in odd[1].traces if trace.start["forked"] and trace.lines("loader")]
        assert traces
        assert all(trace.pid != odd[1].trainer.pid for trace in traces)

    def test_threads_are_counted(self, odd):
        """Two threads iterate 20 loaders of 8 batches each, and none of their batches is lost."""
        lines = (watch.HERE / "odd.py").read_text().splitlines()
        site = f"odd.py:{next(i for i, line in enumerate(lines, 1) if 'for _ in range(20)' in line)}"
        loaders = {line["loader"] for line in odd[1].trainer.lines("loader") if line["site"].endswith(site)}
        iterators = [line["iter"] for line in odd[1].trainer.lines("iter") if line["loader"] in loaders]
        delivered = [event.a for event in odd[1].trainer.of(watch.Kind.NEXT) if not event.c & 3]
        assert (len(loaders), len(iterators)) == (40, 40)
        assert sum(iter_id in iterators for iter_id in delivered) == 320


class TestCompile:
    """torch.compile, TorchScript and autocast."""

    LOGS = {"TORCH_LOGS_FORMAT": "%(message)s"}  # without the time of day

    def test_no_more_breaks(self, tmp_path):
        """Hooks cause no graph break and no recompile, also where Tensor methods are hooked; the losses are equal."""
        alone = watch.bare(tmp_path, "compiled.py", **self.LOGS)
        watched = watch.with_agent(tmp_path, "compiled.py", "hook-tensors", **self.LOGS)
        assert watched.err == alone.err
        assert watched.lines == alone.lines
        assert watched.errors == []


class TestSteps:
    """``--steps N``: observe, then be gone."""

    def test_unhooks(self, tmp_path):
        """After N steps every patched attribute is torch's own again; same results, later steps leave nothing."""
        alone = watch.bare(tmp_path, "stepped.py", "2").lines[0]
        done = watch.with_agent(tmp_path, "stepped.py", "2", steps=10)
        watched = done.lines[0]
        assert watched["losses"] == alone["losses"]
        assert len(watched["before"][0]) > 8
        assert min(watched["before"][1:]) > 0
        assert watched["after"] == [[], 0, 0]
        trainer = done.trainer
        assert trainer.lines("done")[0]["reason"] == "steps"
        assert len(trainer.of(watch.Kind.NEXT)) == 11
        assert done.errors == []
