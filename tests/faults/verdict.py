"""From measurements to verdicts. Pure: no clock, no processes.

A gate uses intervals: a number that misses its bound fails only when its interval excludes the bound; otherwise the
row is "not stable", which is no pass either.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

from catalog import DATA_CAUSES, Fault

Outcome = Literal["pass", "fail", "not stable", "skipped"]

MAX_STALL_ERROR = 0.03
MIN_RIGHT_FRAC = 0.95
MAX_MEDIAN_ADVICE_ERROR, MAX_ADVICE_ERROR = 0.10, 0.25
MIN_ADVICE_ROWS = 18
#: Other programs took this many cores: a miss is repeated, and is not held against headrace.
PRESSED_CORES = 0.15


@dataclass(kw_only=True)
class Diagnosis:
    """One script under one start method: what was planted, named, measured."""

    fault: Fault
    start_method: str
    outcome: Outcome = "skipped"
    named: str | None = None
    runner_up: str | None = None
    stall_frac: float | None = None
    stall_ci: tuple[float, float] | None = None
    truth_frac: float | None = None
    truth_ci: tuple[float, float] | None = None
    outside_cores: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.named in self.fault.accepted

    @property
    def pressed(self) -> bool:
        return self.outside_cores >= PRESSED_CORES

    @property
    def accused_data(self) -> bool:
        """A compute or outside script was called a data problem."""
        return self.fault.cause in ("compute", "outside") and self.named in DATA_CAUSES

    @property
    def stall_error(self) -> float | None:
        if self.stall_frac is None or self.truth_frac is None:
            return None
        return abs(self.stall_frac - self.truth_frac)


@dataclass(kw_only=True)
class Advice:
    """One advised change: what headrace promised and what it brought."""

    fault: Fault
    start_method: str
    outcome: Outcome = "skipped"
    what: str | None = None
    to: Any = None
    predicted: float | None = None
    predicted_ci: tuple[float, float] | None = None
    pairs: list[float] = field(default_factory=list)
    outside_cores: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def measured(self) -> float | None:
        return statistics.median(self.pairs) if self.pairs else None

    @property
    def error(self) -> float | None:
        if self.predicted is None or self.measured is None:
            return None
        return abs(self.predicted / self.measured - 1)

    @property
    def least_error(self) -> float | None:
        """The smallest error that the spread of the pairs allows (their range)."""
        if self.predicted is None or not self.pairs:
            return None
        nearest = min(max(self.predicted, min(self.pairs)), max(self.pairs))
        return abs(self.predicted / nearest - 1)


def judge(row: Diagnosis) -> Outcome:
    """The outcome of one row."""
    if row.accused_data or not row.right:
        return "not stable" if row.pressed else "fail"
    if row.stall_error is None:
        return "fail"
    if row.stall_error <= MAX_STALL_ERROR:
        return "pass"
    return "fail" if row.stall_error - _slack(row) > MAX_STALL_ERROR else "not stable"


def _slack(row: Diagnosis) -> float:
    """Half-widths of both intervals."""
    return sum((high - low) / 2 for low, high in filter(None, (row.stall_ci, row.truth_ci)))


def judge_advice(row: Advice) -> Outcome:
    """A row alone: within the worst-case bound. The median is judged over all rows."""
    if row.error is None or row.least_error is None:
        return "skipped"
    if row.error <= MAX_ADVICE_ERROR:
        return "pass"
    return "fail" if row.least_error > MAX_ADVICE_ERROR else "not stable"


def failed_gates(rows: list[Diagnosis]) -> list[str]:
    """Gates of the diagnosis that do not hold, in words."""
    return failed_cause_gates(rows) + failed_stall_gates(rows)


def failed_cause_gates(rows: list[Diagnosis]) -> list[str]:
    """The gates on what was named."""
    judged = [row for row in rows if row.outcome in ("pass", "fail")]
    if not judged:
        return ["no script was judged"]
    failed = []
    right = sum(row.right for row in judged) / len(judged)
    if right < MIN_RIGHT_FRAC:
        failed.append(f"top cause right in {right:.1%} of {len(judged)}, want {MIN_RIGHT_FRAC:.0%}")
    failed += [f"{row.fault.name} was called {row.named}" for row in judged if row.accused_data]
    return failed


def failed_stall_gates(rows: list[Diagnosis]) -> list[str]:
    """The gate on how large the stall was called."""
    judged = [row for row in rows if row.outcome in ("pass", "fail")]
    failed = [
        f"{row.fault.name} ({row.start_method}): stall {row.stall_frac:.3f}, truth {row.truth_frac:.3f}"
        for row in judged
        if row.right and row.outcome == "fail" and row.stall_frac is not None and row.truth_frac is not None
    ]
    failed += [f"{row.fault.name}: no stall in the record" for row in judged if row.right and row.stall_frac is None]
    return failed


def failed_advice_gates(rows: list[Advice], num_expected: int) -> list[str]:
    """Gates of the advice that do not hold, in words. ``num_expected``: rows wanted (fewer when --only chose some)."""
    known = [row for row in rows if row.error is not None]
    failed = [f"{row.fault.name}: error {row.error:.0%}" for row in known if row.outcome == "fail"]
    if len(known) < num_expected:
        failed.append(f"a prediction for {len(known)} faults, want {num_expected}")
    least = [row.least_error for row in known if row.least_error is not None]
    if least and statistics.median(least) > MAX_MEDIAN_ADVICE_ERROR:
        failed.append(f"median error at least {statistics.median(least):.1%}, want {MAX_MEDIAN_ADVICE_ERROR:.0%}")
    return failed


def median_advice_error(rows: list[Advice]) -> float | None:
    """Median of the errors of the rows that have one."""
    errors = [row.error for row in rows if row.error is not None]
    return statistics.median(errors) if errors else None
