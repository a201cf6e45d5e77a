"""Training loops without any DataLoader: optimizer steps bound the steps, stacks name what runs between. Pure."""

from __future__ import annotations

import itertools
from typing import Any

from ..records.run import CauseName, Change, Evidence, Finding, Hotspot, Loader, Run, RunnerUp, Series, StepNs, TimeFrac
from ..records.rundir import EventKind
from . import analyse as core
from . import stats
from .events import Trace
from .hotspots import hotspots

#: Frames that mean: this is the model, not the data.
_MODEL = (
    "torch/nn/modules/module.py", "torch/autograd/", "torch/optim/", "torch/_tensor.py", "torch/amp/",
    "torch/nn/functional.py",
)  # fmt: skip
_MIN_STEPS = 8
#: A few hundred samples cannot tell a larger share from all of the time: the promised speed-up ends at 20.
_MOST_SHARE = 0.95


def add(run: Run, observed: core.Observed) -> None:
    """Adds a stand-in loader for each trainer that stepped an optimizer and never iterated a loader."""
    for trace in observed.traces:
        if trace.of(EventKind.NEXT) or trace.of(EventKind.CALL) or len(trace.of(EventKind.OPTIMIZER)) < _MIN_STEPS:
            continue
        loader = _loader(trace, observed)
        process = next((p for p in run.processes if p.pid == trace.pid and not p.loaders), None)
        if process is not None:
            process.loaders.append(loader)
        if run.finding is None:
            run.finding = loader.finding


def _loader(trace: Trace, observed: core.Observed) -> Loader:
    steps = trace.of(EventKind.OPTIMIZER)
    times = [float(b.t1 - a.t1) for a, b in itertools.pairwise(steps)]
    lines = [line for line in trace.lines("stacks") if not line.get("fetch")]
    between = _between(lines)
    share = between["share"]
    loader = Loader(
        site=between["site"] or "no loader",
        role="train",
        kind="stacks",
        num_steps=len(times),
        step_ns=StepNs(mean=stats.mean(times), p50=stats.median(times), p95=stats.percentile(times, 95)),
        stall_frac=share,
        steady_stall_frac=share,
        hotspots=between["spots"],
        simulated=bool(trace.lines("simulated")),
        series=Series(
            step_idx=list(range(min(len(times), 5000))),
            start_ns=[event.t1 - observed.zero_ns for event in steps[:-1]][:5000],
            step_ns=[round(t) for t in times][:5000],
            wait_ns=[round(t * share) if share else 0 for t in times][:5000],
            stall_ns=[round(t * share) if share else 0 for t in times][:5000],
            epoch_start=[False] * min(len(times), 5000),
            num_steps_seen=len(times),
        ),
    )
    if share is not None:
        rest = dict.fromkeys(("epoch", "other_loader", "copy", "sync", "launch", "rank", "outside"), 0.0)
        loader.time_frac = TimeFrac(step=1 - share, stall=share, **rest)
    loader.finding = _finding(between)
    return loader


def _between(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Share of samples outside the model, split into running and blocked, with the hottest line."""
    rows = [row for line in lines for row in line.get("rows", ())]
    total = sum(count for count, _, _ in rows)
    outside = [row for row in rows if not any(part in frame for frame in row[2] for part in _MODEL)]
    num = sum(count for count, _, _ in outside)
    blocked = sum(count for count, state, _ in outside if state not in ("running", "unknown", "lock"))
    spots: list[Hotspot] = hotspots([{"rows": outside}], blocked * 2 > num) if num else []
    return {
        "share": num / total if total else None,
        "blocked": blocked / num if num else 0.0,
        "spots": spots,
        "site": spots[0].site if spots else None,
        "samples": total,
    }


def _finding(between: dict[str, Any]) -> Finding:
    share: float | None = between["share"]
    rows = [Evidence(name="stack samples", value=between["samples"], unit="count")]
    if share is None or between["samples"] < 20:
        return Finding(
            cause="unknown", stall_frac=None, confidence="low", evidence=rows, between=("compute", "preprocess"),
            summary="No DataLoader was used and the run was too short to see what runs between the optimizer's steps.",
            separate_with="headrace run --data module:function ...",
        )  # fmt: skip
    rows += [
        Evidence(name="time outside model, backward and optimizer", value=round(share, 4), unit="frac"),
        Evidence(name="of it blocked", value=round(between["blocked"], 4), unit="frac"),
    ]
    if share < 0.1:
        return Finding(
            cause="compute", stall_frac=share, confidence="medium", share_frac=1 - share, evidence=rows,
            summary=f"Nothing to gain from data: {1 - share:.0%} of the time is in model, backward and optimizer.",
        )  # fmt: skip
    blocked = between["blocked"] > 0.5
    cause: CauseName = "storage" if blocked else "preprocess"
    other: CauseName = "preprocess" if blocked else "storage"
    spot = between["spots"][0]
    what = f"{spot.site} ({spot.function})"
    line = f"# move {what} into a DataLoader with workers"
    change = Change(what="work between steps", line=line, speedup=1 / (1 - min(share, _MOST_SHARE)))
    change.speedup_ci = (1.0, 1 / (1 - min(share * 1.15, _MOST_SHARE)))
    return Finding(
        cause=cause, stall_frac=share, share_frac=share, confidence="medium", evidence=rows, changes=[change],
        summary=f"{share:.0%} of the time: no DataLoader; {what} runs between the optimizer's steps.",
        runner_up=RunnerUp(cause=other, share_frac=round(share * min(between["blocked"], 1 - between["blocked"]), 4)),
    )  # fmt: skip
