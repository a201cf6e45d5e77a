"""Takes the measurements of one row: a watched run and the truth, or a prediction and interleaved pairs."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import processes
from catalog import Fault
from processes import Settings
from verdict import PRESSED_CORES, Advice, Diagnosis, Outcome, judge, judge_advice

#: Times a row is tried in all when it missed under pressure from outside.
MAX_TRIES = 3
#: Runs under headrace of a row that missed with the first one: what is judged is their median and their spread.
WATCHED_RUNS = 3
#: Lengths of the three kinds of run, in seconds under the fault.
WATCHED_S, TRUTH_S, PAIR_S = 6.0, 3.0, 2.5


class Budget:
    """Wall time for the whole suite; when it is spent, rows are no longer repeated."""

    def __init__(self, minutes: float) -> None:
        self.end_s = time.monotonic() + minutes * 60

    @property
    def spent(self) -> bool:
        return time.monotonic() > self.end_s


def diagnose(fault: Fault, start_method: str, repeats: int, settings: Settings, budget: Budget) -> Diagnosis:
    """Planted against named, stall against truth; repeated while it misses on a busy machine."""
    for _ in range(MAX_TRIES):
        row = Diagnosis(fault=fault, start_method=start_method)
        try:
            steady = _truth(row, repeats, settings)
            runs = [_watch(row, settings)]
            row.outcome = _take(row, runs, steady)
            while row.outcome != "pass" and len(runs) < WATCHED_RUNS:
                # Both again and in turn: a disk that has become slower since is no error of either.
                steady += _truth(row, repeats, settings)
                runs.append(_watch(row, settings))
                row.outcome = _take(row, runs, steady)
        except processes.Skipped as reason:
            row.notes.append(str(reason))
        except processes.Broken as error:
            row.outcome = "fail"
            row.notes.append(str(error))
        settled = row.outcome in ("pass", "skipped") or (row.outcome == "fail" and not row.pressed)
        if settled or budget.spent:
            break
    return row


def _truth(row: Diagnosis, repeats: int, settings: Settings) -> list[float]:
    """The true steady stall of each of several runs."""
    repeats = min(repeats, row.fault.header.get("truth_repeats", repeats))
    # With many workers the batches that were made while they started fill much of a short run: same length then.
    seconds = WATCHED_S if row.fault.header.get("long_truth") else TRUTH_S
    arguments = ["--truth", "--repeats", str(repeats), "--seconds", str(seconds), "--start-method", row.start_method]
    ran = processes.bare(row.fault, arguments, settings)
    row.outside_cores = max(row.outside_cores, ran.record["outside_cores"])
    return list(ran.record["steady"])


@dataclass(frozen=True)
class Watched:
    """What one run under headrace said."""

    named: str | None
    runner_up: str | None
    stall_frac: float | None
    stall_ci: tuple[float, float] | None


def _take(row: Diagnosis, runs: list[Watched], truths: list[float]) -> Outcome:
    """Medians over the runs; their spread is part of the interval, and a cause is what most of them named."""
    row.truth_frac, row.truth_ci = statistics.median(truths), (min(truths), max(truths))
    row.named = Counter(run.named for run in runs).most_common(1)[0][0]
    row.runner_up = next(run.runner_up for run in runs if run.named == row.named)
    if len({run.named for run in runs}) > 1:
        row.notes = ["named " + ", ".join(str(run.named) for run in runs)]
    known = [run for run in runs if run.stall_frac is not None]
    if known:
        row.stall_frac = statistics.median(run.stall_frac for run in known)
        ends = [end for run in known for end in (run.stall_ci or (run.stall_frac, run.stall_frac))]
        row.stall_ci = (min(ends), max(ends))
    return judge(row)


def _watch(row: Diagnosis, settings: Settings) -> Watched:
    ran = processes.watched(row.fault, ["--seconds", str(WATCHED_S), "--start-method", row.start_method], settings)
    finding = ran.record.get("finding") or {}
    runner_up = (finding.get("runner_up") or {}).get("cause")
    row.outside_cores = max(row.outside_cores, ran.outside_cores)
    loader = subject(ran.record, row.fault)
    if loader is None:
        row.notes.append("the record has no loader of the script")
        return Watched(finding.get("cause"), runner_up, None, None)
    interval = tuple(loader["stall_ci"]) if loader.get("stall_ci") else None
    return Watched(finding.get("cause"), runner_up, loader.get("steady_stall_frac"), interval)


def subject(record: dict[str, Any], fault: Fault) -> dict[str, Any] | None:
    """The training loader of the rank that the truth is about: the one with most steps that is no validation."""
    rank = fault.header.get("truth_rank", 0)
    ranked = fault.header.get("ranks", 1) > 1
    loaders = [
        loader
        for process in record.get("processes", [])
        if not ranked or process.get("rank") in (None, rank)
        for loader in process.get("loaders", [])
        if loader.get("role") != "validation"
    ]
    return max(loaders, key=lambda loader: loader.get("num_steps", 0), default=None)


def advise(fault: Fault, start_method: str, num_pairs: int, settings: Settings, budget: Budget) -> Advice:
    """Predicted against measured speed-up; more pairs while the spread leaves it open."""
    row = Advice(fault=fault, start_method=start_method)
    try:
        ran = processes.watched(fault, ["--seconds", str(WATCHED_S), "--start-method", start_method], settings)
        _predict(row, ran.record)
        row.outside_cores = ran.outside_cores
        while row.predicted is not None and (len(row.pairs) < num_pairs or _open(row, num_pairs, budget)):
            row.pairs.append(_pair(row, settings))
        row.outcome = judge_advice(row)
    except processes.Skipped as reason:
        row.notes.append(str(reason))
    except processes.Broken as error:
        row.outcome = "fail"
        row.notes.append(str(error))
    return row


def _open(row: Advice, num_pairs: int, budget: Budget) -> bool:
    undecided = row.outside_cores >= PRESSED_CORES and judge_advice(row) != "pass"
    return undecided and len(row.pairs) < 2 * num_pairs and not budget.spent


def _predict(row: Advice, record: dict[str, Any]) -> None:
    """The change that the header knows how to apply; else the first one that carries a prediction."""
    changes = (record.get("finding") or {}).get("changes") or []
    known = [change for change in changes if any(word in change["what"] for word in row.fault.header["advice"])]
    predicted = [change for change in known or changes if change.get("speedup") is not None]
    if not predicted:
        row.notes.append("no prediction; advised: " + (", ".join(change["what"] for change in changes) or "nothing"))
        return
    change = predicted[0]
    row.what, row.to, row.predicted = change["what"], change.get("to"), change["speedup"]
    row.predicted_ci = tuple(change["speedup_ci"]) if change.get("speedup_ci") else None


def _pair(row: Advice, settings: Settings) -> float:
    """Step rate with the change over step rate without it, each in a fresh process."""
    common = ["--seconds", str(PAIR_S), "--start-method", row.start_method]
    planted = processes.bare(row.fault, common, settings)
    fixed = processes.bare(row.fault, [*common, *change_arguments(row)], settings)
    row.outside_cores = max(row.outside_cores, planted.outside_cores, fixed.outside_cores)
    clock = f"{row.fault.header.get('rate', 'steady')}_ns"
    return float(planted.record[clock] / fixed.record[clock])


def change_arguments(row: Advice) -> list[str]:
    """``--set`` with headrace's own value where the script has that setting; else ``--fixed``."""
    fixed = row.fault.header["fixed"]
    if row.what in fixed and isinstance(row.to, (bool, int)):
        return ["--set", f"{row.what}={row.to}"]
    return ["--fixed"]
