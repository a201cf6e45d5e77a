"""What the demo says at its end: a table of before and after, and the prediction beside the measurement. Pure."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from headrace.demo.advice import subject
from headrace.demo.part import Part
from headrace.records.run import Change


def comparison(before: Part, after: Part | None) -> Table:
    """Returns the table of both parts, one row per question. A value that was not measured reads ``not measured``."""
    parts = {"before": before} if after is None else {"before": before, "after": after}
    table = Table("", title="headrace demo")
    for name in parts:
        table.add_column(name, justify="right")
    for question, answer in _QUESTIONS.items():
        table.add_row(question, *(answer(part) for part in parts.values()))
    return table


def verdict(before: Part, change: Change | None, after: Part | None) -> list[str]:
    """Returns the closing lines: device, finding, change, predicted and measured gain."""
    finding = before.run.finding
    lines = [f"device: {before.device}"]
    lines += [f"finding: {finding.summary}"] if finding else ["finding: none"]
    if change is None or after is None:
        return [*lines, "nothing to change: the finding has no advice that this script has an option for"]
    lines.append(f"changed: {change.what} {change.from_} -> {change.to}")
    measured = after.steps_per_s / before.steps_per_s
    return [*lines, f"predicted: {_predicted(change)}", f"measured:  {measured:.2f} x (by the script's own clock)"]


def _cause(part: Part) -> str:
    """The cause's name."""
    return part.run.finding.cause if part.run.finding else "none"


def _stall(part: Part) -> str:
    """Stall fraction in percent."""
    loader = subject(part.run)
    frac = loader.stall_frac if loader else None
    return "not measured" if frac is None else f"{100 * frac:.0f} %"


def _step(part: Part) -> str:
    """Mean step time in ms."""
    loader = subject(part.run)
    step = loader.step_ns if loader else None
    return "not measured" if step is None else f"{step.mean / 1e6:.1f} ms"


def _predicted(change: Change) -> str:
    """The predicted gain with its interval."""
    if change.speedup is None:
        ci = change.speedup_ci
        return "no number" if ci is None else f"{ci[0]:.2f} to {ci[1]:.2f} x"
    interval = f" ({change.speedup_ci[0]:.2f} to {change.speedup_ci[1]:.2f})" if change.speedup_ci else ""
    return f"{change.speedup:.2f} x{interval}"


_QUESTIONS: dict[str, Callable[[Part], str]] = {
    "cause": _cause,
    "stall": _stall,
    "step time": _step,
    "steps/s": lambda part: f"{part.steps_per_s:.1f}",
}
