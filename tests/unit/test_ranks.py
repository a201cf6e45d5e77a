"""Who is late, and who only waits for the late one."""

from __future__ import annotations

import pytest

from headrace.core import ranks
from tests.unit.synth import MS, Kind, Service, Trainer, observe
from tests.unit.test_measure import facts_of


def group(late=1, num_ranks=3, late_ns=20 * MS, data=True, collective=False):
    """Ranks of which one is late by ``late_ns`` in each step; the others wait for it in backward or a collective."""
    trainers = []
    for rank in range(num_ranks):
        trainer = Trainer(pid=1_000 * (rank + 1), rank=rank)
        is_late = rank == late
        fetch = Service(on_cpu_ns=late_ns if is_late and data else late_ns // 100)
        wait = 0 if is_late else late_ns
        for _ in trainer.loader(fetch=fetch, batches=40):
            trainer.body(20 * MS + (late_ns if is_late and not data else 0), backward_ns=10 * MS)
            trainer.note(Kind.DIST if collective else Kind.BACKWARD, trainer.now, trainer.now + wait)
            trainer.spend(wait, 0)
        trainers.append(trainer)
    return trainers


def attributed(trainers):
    seen = observe(trainers)
    judged = []
    for trainer in trainers:
        trace = next(trace for trace in seen.traces if trace.pid == trainer.pid)
        judged.extend((trace, facts) for facts in facts_of(trainer, seen).values())
    ranks.attribute(judged)
    return {trace.rank: facts for trace, facts in judged}


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("data", [False, True])
def test_the_late_rank_is_the_culprit(num_ranks, collective, data):
    """The rank that waits least in collectives arrived last; what the others waited moves from step to ``rank``."""
    facts = attributed(group(late=1, num_ranks=num_ranks, collective=collective, data=data))
    assert facts[1].parts_ns["rank"] == 0
    for rank in set(range(num_ranks)) - {1}:
        assert facts[rank].share(facts[rank].parts_ns["rank"]) == pytest.approx(0.5, abs=0.03)
        assert sum(facts[rank].parts_ns.values()) == pytest.approx(facts[rank].total_ns)
        text = ranks.culprit_text(facts[rank])
        assert "rank 1" in text
        assert ("data" in text) == data


@pytest.mark.parametrize("late_ns", [0, MS // 2])
def test_ranks_that_are_about_even_blame_nobody(late_ns):
    """A few percent between ranks is how machines are."""
    for facts in attributed(group(late_ns=late_ns)).values():
        assert facts.parts_ns["rank"] == 0


def test_one_rank_alone_waits_for_nobody():
    """A single process, or processes without a rank, are left as they are."""
    (facts,) = attributed(group(late=0, num_ranks=1)).values()
    assert facts.parts_ns["rank"] == 0
    trainers = group()
    for trainer in trainers:
        trainer.rank = None
    assert all(facts.parts_ns["rank"] == 0 for facts in attributed(trainers).values())


def test_ranks_without_any_collective_are_not_compared():
    """Where neither backward nor a collective was seen, nothing says who waited."""
    trainers = group()
    for trainer in trainers:
        trainer.events = [event for event in trainer.events if event.kind not in (Kind.BACKWARD, Kind.DIST)]
    assert all(facts.parts_ns["rank"] == 0 for facts in attributed(trainers).values())
