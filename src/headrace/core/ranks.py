"""Who is late: in a process group every rank waits in the collective for the last one. Pure.

The rank with the least wait in the collectives arrived last (the culprit); what the others wait beyond it is theirs to
show as ``rank`` (the rule of Holistic Trace Analysis and TraceML; facts/diagnosis 1.2). The wait in DDP's backward is
not visible from Python, so backward plus explicit collectives stand for it: equal work takes equal time but for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import stats
from .events import Trace
from .measure import Facts

#: Ranks differ by this share of the time before one is called late.
LATE_FRAC = 0.05


def attribute(judged: Sequence[tuple[Trace, Facts]]) -> None:
    """Moves from ``step`` to ``rank`` what each rank's training loader waited for the latest rank."""
    subjects: dict[int, Facts] = {}
    for trace, facts in judged:
        if trace.rank is not None and facts.view.role == "train":
            best = subjects.get(trace.rank)
            if best is None or facts.total_ns > best.total_ns:
                subjects[trace.rank] = facts
    if len(subjects) < 2:
        return
    waits = {rank: _collective_ns(facts) for rank, facts in subjects.items()}
    if any(wait is None for wait in waits.values()):
        return
    known = {rank: wait for rank, wait in waits.items() if wait is not None}
    culprit = min(known, key=lambda rank: known[rank])
    for rank, facts in subjects.items():
        excess = (known[rank] - known[culprit]) * len(facts.view.steps)
        if rank == culprit or facts.share(excess) < LATE_FRAC:
            continue
        moved = min(excess, facts.parts_ns["step"])
        facts.parts_ns["rank"] = moved
        facts.parts_ns["step"] -= moved
        facts.view.info = {**facts.view.info, "culprit": culprit, "culprit_why": _why(subjects[culprit], facts)}


def _collective_ns(facts: Facts) -> float | None:
    """Mean time per step in backward and in collectives called from Python."""
    steps = len(facts.view.steps)
    if not steps or not (facts.backward_ns or facts.dist_ns):
        return None
    return (facts.backward_ns + facts.dist_ns) / steps


def _why(culprit: Facts, victim: Facts) -> str:
    def wait(facts: Facts) -> float:
        return stats.mean([float(step.stall_ns) for step in facts.view.steps])

    more = wait(culprit) - wait(victim)
    lost = victim.parts_ns["rank"] / max(len(victim.view.steps), 1)
    return "waits for its data" if more > lost / 2 else "takes longer in its own step"


def culprit_text(facts: Facts) -> str:
    """Who is late and why, for the rank that waits; ``attribute`` found out before."""
    info = facts.view.info
    return f"rank {info.get('culprit')} {info.get('culprit_why')}: see its own row"
