"""From traces and samples to the record of a run: each loader measured, judged and advised. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..records.run import Finding, Hotspot, Loader, Overhead, Process, RunnerUp, ServiceNs, StepNs, TimeFrac, WaitFrac
from ..records.rundir import NEXT_STOP, EventKind, HostSample, Machine
from . import advice, evidence, picture, ranks, stats
from .attribution import PLACES, TaskIndex
from .causes import Verdict, decide, narrow
from .events import Trace
from .hostfacts import host_facts
from .hotspots import hotspots
from .measure import Facts, measure
from .timeline import LoaderView, loader_views


@dataclasses.dataclass
class Observed:
    """All that a run directory holds, decoded."""

    traces: list[Trace]
    samples: list[HostSample]
    machine: Machine | None
    zero_ns: int
    warmup: int = 0


@dataclasses.dataclass
class Judged:
    """One loader of one process, with what the report needs of it."""

    trace: Trace
    facts: Facts
    spots: list[Hotspot]
    verdict: Verdict | None = None
    loader: Loader | None = None


def analyse(observed: Observed) -> tuple[list[Process], Finding | None]:
    """Every trainer's loaders, and the finding of the one that costs most."""
    workers = {trace.pid: trace for trace in observed.traces if trace.is_worker}
    judged: list[Judged] = []
    # A loader that a worker's dataset reads is part of that worker's fetch.
    trainers = [trace for trace in observed.traces if trace.is_trainer and not trace.is_worker]
    for trace in trainers:
        judged.extend(_measure_process(trace, workers, observed))
    ranks.attribute([(j.trace, j.facts) for j in judged])
    for one in judged:
        _judge(one, observed)
    processes = [_process(trace, [j for j in judged if j.trace is trace]) for trace in trainers]
    return processes, top_finding(judged)


def _measure_process(trace: Trace, workers: dict[int, Trace], observed: Observed) -> list[Judged]:
    views = loader_views(trace)
    found = []
    for view in views:
        _cut_warmup(view, observed.warmup)
        if not view.passes:
            continue
        index = TaskIndex(trace, workers, view)
        pids = {pid for group in view.workers.values() for pid in group}
        host = host_facts(observed.samples, observed.machine, trace.pid, pids, view.begin, view.end)
        others = [other for other in views if other is not view and other.passes]
        facts = measure(trace, view, others, index, host)
        lines = [line for pid in pids if pid in workers for line in workers[pid].lines("stacks")]
        if not pids:
            # The samples do not say whose fetch it was: they are told of with the loader that costs most.
            lines = [line for line in trace.lines("stacks") if line.get("fetch")] if view is views[0] else []
        blocked = (facts.fetch_split or {}).get("blocked", 0.0) > 0.5
        found.append(Judged(trace, facts, hotspots(lines, blocked)))
    return found


def _cut_warmup(view: LoaderView, warmup: int) -> None:
    """Leaves out the first steps of the program, as ``--warmup`` asks."""
    for one in view.passes:
        cut = min(warmup, len(one.steps))
        if cut:
            one.steps = one.steps[cut:]
            one.begin, one.iter_ns = (one.steps[0].wait0 if one.steps else one.end), 0
        warmup -= cut
    view.passes = [one for one in view.passes if one.steps]


def _gains(facts: Facts) -> dict[str, float]:
    """Speed-ups that the rules ask for before they name ``oversubscribed``; without intervals, which cost time."""
    made = {"quota": advice.quota_gain(facts, 0)}
    if facts.fetch_split is not None and facts.share(facts.stall_ns) >= 0.02:
        if narrow(facts):
            made["affinity"] = advice.affinity_gain(facts, 0)
        made["threads"] = advice.threads_gain(facts, 0)
        made["fewer"] = advice.fewer_gain(facts, 0)
    return {name: gain.speedup for name, gain in made.items() if gain is not None}


def _judge(one: Judged, observed: Observed) -> None:
    facts, view = one.facts, one.facts.view
    rank_frac = facts.share(facts.parts_ns["rank"])
    verdict = one.verdict = decide(facts, rank_frac, _gains(facts))
    if verdict.cause == "rank":
        verdict.detail = ranks.culprit_text(facts)
    info = view.info
    loader = one.loader = Loader(
        site=view.site,
        role=view.role,  # type: ignore[arg-type]  # set from the same three words
        kind="call" if view.is_call else "dataloader",
        dataset=info.get("dataset"),
        batch_size=info.get("batch_size"),
        num_workers=info.get("num_workers"),
        start_method=info.get("start_method") if info.get("num_workers") else None,
        pin_memory=info.get("pin_memory"),
        prefetch_factor=info.get("prefetch_factor"),
        persistent_workers=info.get("persistent_workers"),
        in_order=info.get("in_order"),
        num_iterators=len(view.workers),
        num_steps=len(view.steps),
        stall_frac=round(facts.share(facts.stall_ns), 6),
        steady_stall_frac=None if facts.steady_stall_frac is None else round(facts.steady_stall_frac, 6),
        stall_ci=facts.stall_ci,
        simulated=bool(one.trace.lines("simulated")),
        hotspots=one.spots,
        series=picture.series(view, observed.zero_ns),
        lanes=picture.lanes(one.trace, view, facts.tasks, observed.zero_ns),
    )
    _numbers(loader, facts)
    loader.finding = _finding(one)


def _numbers(loader: Loader, facts: Facts) -> None:
    steady = facts.view.steady or facts.view.steps
    times = [float(step.step_ns) for step in steady]
    if times:
        loader.step_ns = StepNs(mean=stats.mean(times), p50=stats.median(times), p95=stats.percentile(times, 95))
    loader.time_frac = TimeFrac(**{k: facts.share(v) for k, v in facts.parts_ns.items()})
    waited = sum(facts.wait_ns.values())
    if waited > 0:
        loader.wait_frac = WaitFrac(**{place: facts.wait_ns[place] / waited for place in PLACES})
    loader.service_ns = _services(facts)
    if loader.batch_size:
        samples = loader.batch_size * len(facts.view.steps)
        loader.samples_per_s = samples / (facts.total_ns / 1e9)
        free = facts.total_ns - facts.stall_ns
        loader.ceiling_samples_per_s = samples / (free / 1e9) if free > 0 else None


def _services(facts: Facts) -> ServiceNs:
    out = ServiceNs()
    tasks = facts.tasks
    bodies = [float(step.body_ns) for step in facts.view.steps]
    out.step = stats.mean(bodies) if bodies else None
    if not tasks:
        return out
    fetches = [float(task.fetch_ns) for task in tasks]
    out.fetch, out.fetch_p95 = stats.mean(fetches), stats.percentile(fetches, 95)
    out.collate = stats.mean([float(task.collate_ns) for task in tasks])
    wall = stats.mean([float(task.fetch1 - task.fetch0) for task in tasks])
    queue = [float(task.run_queue_ns) for task in tasks if task.run_queue_ns is not None]
    out.fetch_blocked = stats.mean([float(task.blocked_ns) for task in tasks])
    if queue:
        out.fetch_run_queue = stats.mean(queue)
        out.fetch_on_cpu = max(wall - out.fetch_blocked - out.fetch_run_queue, 0.0)
    moved = [float(max(task.recv1 - task.fetch1, 0)) for task in tasks if task.recv1 is not None]
    out.transport = stats.mean(moved) if moved else None
    pinned = [float(t.pin1 - t.pin0) for t in tasks if t.pin0 is not None and t.pin1 is not None]
    out.pin = stats.mean(pinned) if pinned else None
    return out


def _finding(one: Judged) -> Finding:
    facts, verdict = one.facts, one.verdict
    assert verdict is not None
    finding = Finding(
        cause=verdict.cause,
        stall_frac=round(facts.share(facts.stall_ns), 6),
        share_frac=round(verdict.share_frac, 6),
        confidence=_confidence(facts, verdict),
        summary=evidence.summary(facts, verdict),
        evidence=evidence.rows(facts, verdict, one.spots),
        changes=advice.changes(facts, verdict, one.spots),
        between=verdict.between,
    )
    if verdict.runner_up is not None:
        finding.runner_up = RunnerUp(cause=verdict.runner_up, share_frac=round(verdict.runner_share_frac, 6))
    if verdict.between is not None:
        finding.separate_with = (
            "headrace run --steps 200 with num_workers=0, which shows the fetch in the trainer itself"
        )
    return finding


def _confidence(facts: Facts, verdict: Verdict) -> Any:
    steps = len(facts.view.steps)
    if verdict.cause == "unknown" or steps < 12:
        return "low"
    if verdict.cause == "compute":
        return "high" if steps >= 30 else "medium"
    margin = verdict.share_frac / max(verdict.runner_share_frac, 1e-9) if verdict.runner_up != "compute" else 9.0
    if margin >= 2 and steps >= 30 and verdict.share_frac >= 0.1:
        return "high"
    return "medium" if margin >= 1.3 else "low"


def top_finding(judged: list[Judged]) -> Finding | None:
    """The finding of the loader that costs most; of the late rank when the others wait for it."""
    known = [one for one in judged if one.loader is not None and one.loader.finding is not None]
    if not known:
        return None
    training = [one for one in known if one.facts.view.role != "validation"] or known

    def cost(one: Judged) -> float:
        finding = one.loader.finding if one.loader else None
        if finding is None or finding.cause == "compute":
            return 0.0
        return (finding.share_frac or 0.0) * one.facts.total_ns

    late = [one for one in training if one.verdict is not None and one.verdict.cause == "rank"]
    if late and max(cost(one) for one in training) > 0:
        worst = max(late, key=cost)
        return worst.loader.finding if worst.loader else None
    best = max(training, key=lambda one: (cost(one), one.facts.total_ns))
    return best.loader.finding if best.loader else None


def _process(trace: Trace, judged: list[Judged]) -> Process:
    torch = next((line.get("version") for line in trace.lines("torch")), None)
    errors = [f"{line.get('where')}: {line.get('text')}" for line in trace.lines("error")]
    note = "headrace could not see everything here: " + "; ".join(errors) if errors else None
    return Process(
        pid=trace.pid,
        rank=trace.rank,
        argv=trace.start.get("argv") or [],
        python=trace.start.get("python"),
        torch=torch,
        note=note,
        loaders=[one.loader for one in judged if one.loader is not None],
    )


def overhead(observed: Observed, sampler_cpu_ns: int | None, duration_ns: int | None) -> Overhead:
    """What watching cost: time in hooks of the slowest trainer, CPU of the sampler."""
    out = Overhead()
    fracs = []
    for trace in observed.traces:
        steps = [event for event in (trace.of(EventKind.NEXT) or trace.of(EventKind.CALL)) if not event.c & NEXT_STOP]
        if len(steps) < 2 or not trace.hook_ns:
            continue
        span = max(steps[-1].t1 - steps[0].t0, 1)
        fracs.append((trace.hook_ns / span, trace.hook_ns / len(steps)))
    if fracs:
        out.trainer_frac, out.trainer_ns_per_step = max(fracs)
    if sampler_cpu_ns is not None and duration_ns:
        out.sampler_cores = sampler_cpu_ns / duration_ns
    return out
