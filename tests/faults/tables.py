"""Prints rows: the terminal with rich, Markdown for the docs, JSON for machines."""

from __future__ import annotations

import collections
from typing import Any, TypeVar

from catalog import Fault
from rich.console import Console
from rich.table import Table
from verdict import Advice, Diagnosis, median_advice_error

Row = TypeVar("Row", Diagnosis, Advice)
COLOURS = {"pass": "green", "fail": "red", "not stable": "yellow", "skipped": "dim"}
DIAGNOSIS_HEAD = ("script", "start", "planted", "named", "runner-up", "stall", "truth", "others' cores", "outcome")
ADVICE_HEAD = ("script", "start", "change", "to", "predicted", "measured", "pairs' range", "error", "outcome")


def cells(row: Diagnosis | Advice) -> tuple[str, ...]:
    """One row as text."""
    if isinstance(row, Advice):
        spread = f"{min(row.pairs):.2f} to {max(row.pairs):.2f}" if row.pairs else ""
        change = (row.what or "", "" if row.to is None else str(row.to)[:24])
        numbers = (_number(row.predicted, "x"), _number(row.measured, "x"), spread, _percent(row.error))
        return (row.fault.name, row.start_method, *change, *numbers, row.outcome)
    stall = (_percent(row.stall_frac), _spread(row.truth_frac, row.truth_ci), f"{row.outside_cores:.2f}")
    planted = " or ".join([row.fault.cause, *row.fault.header.get("also", [])])
    return (row.fault.name, row.start_method, planted, row.named or "", row.runner_up or "", *stall, row.outcome)


def show(console: Console, rows: list[Diagnosis] | list[Advice]) -> None:
    """The table of rows with their notes below."""
    table = Table(*(ADVICE_HEAD if rows and isinstance(rows[0], Advice) else DIAGNOSIS_HEAD))
    for row in rows:
        table.add_row(*cells(row), style=COLOURS[row.outcome] if row.outcome != "pass" else None)
    console.print(table)
    for row in rows:
        for note in row.notes:
            console.print(f"{row.fault.name}: {note}", style="dim", markup=False)


def confusion(rows: list[Diagnosis]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the matrix, planted down, named across."""
    counts = collections.Counter((row.fault.cause, row.named or "nothing") for row in rows if row.outcome != "skipped")
    planted = sorted({cause for cause, _ in counts})
    named = sorted({name for _, name in counts}, key=lambda name: (name not in planted, name))
    lines = [[cause, *(str(counts[cause, name] or "") for name in named)] for cause in planted]
    return ["planted \\ named", *named], lines


def show_confusion(console: Console, rows: list[Diagnosis]) -> None:
    """The confusion matrix, right answers in green."""
    head, lines = confusion(rows)
    table = Table(*head, title="planted x named")
    for line in lines:
        table.add_row(line[0], *(_coloured(line[0], name, text) for name, text in zip(head[1:], line[1:], strict=True)))
    console.print(table)


def markdown(rows: list[Diagnosis] | list[Advice]) -> str:
    """The same for the docs."""
    advice = bool(rows) and isinstance(rows[0], Advice)
    text = _markdown_table(ADVICE_HEAD if advice else DIAGNOSIS_HEAD, [cells(row) for row in rows])
    if not advice:
        head, lines = confusion([row for row in rows if isinstance(row, Diagnosis)])
        text = _markdown_table(head, lines) + "\n" + text
    return text


def as_json(rows: list[Diagnosis] | list[Advice]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [
        {"script": row.fault.name, "cause": row.fault.cause}
        | {name: value for name, value in vars(row).items() if name != "fault"}
        for row in rows
    ]


def from_json(kind: type[Row], saved: dict[str, Any], fault: Fault) -> Row:
    """A row that ``as_json`` wrote."""
    values = {name: value for name, value in saved.items() if name not in ("script", "cause")}
    for name, value in values.items():
        if name.endswith("_ci") and value is not None:
            values[name] = tuple(value)
    return kind(fault=fault, **values)


def advice_summary(rows: list[Advice]) -> str:
    """One line over all rows."""
    errors = [row.error for row in rows if row.error is not None]
    middle = median_advice_error(rows)
    return f"{len(errors)} predictions, median error {_percent(middle)}, worst {_percent(max(errors, default=None))}"


def _markdown_table(head: Any, lines: Any) -> str:
    rule = ["---"] * len(head)
    return "".join("| " + " | ".join(line) + " |\n" for line in [list(head), rule, *map(list, lines)])


def _coloured(planted: str, named: str, text: str) -> str:
    return f"[green]{text}[/]" if planted == named else f"[red]{text}[/]"


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.2f}{unit}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _spread(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None or interval is None:
        return _percent(value)
    return f"{value:.1%} ({interval[0]:.1%} to {interval[1]:.1%})"
