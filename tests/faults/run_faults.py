"""Runs the planted faults under ``headrace run`` and says whether it is right.

    python tests/faults/run_faults.py                      causes and stalls, fork
    python tests/faults/run_faults.py --start-method all   under fork, spawn and forkserver
    python tests/faults/run_faults.py --advice             predicted against measured speed-up
    python tests/faults/run_faults.py --plants             the scripts alone: is each fault really there?
    python tests/faults/run_faults.py --saved FILE...      tables and gates of rows that were taken in parts (--json)

Exit code 0 when every gate holds, 1 when one fails, 3 when none fails but rows are not stable (a busy machine).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent))
import catalog
import measure
import plants
import processes
import tables
import verdict
from catalog import Fault
from measure import Budget
from processes import Settings
from rich.console import Console

START_METHODS = ("fork", "spawn", "forkserver")
#: The faults are made for two cores; on a bigger machine the suite keeps to two of them.
NUM_CORES = 2
Row = TypeVar("Row", verdict.Diagnosis, verdict.Advice)


def main() -> int:
    """Run what the command line asks for; the exit code says how it went."""
    given = _arguments()
    if given.saved:
        return _again(Console(width=None if sys.stdout.isatty() else 160), given)
    _keep_to_cores(NUM_CORES)
    processes.cgroups.remove_stale()
    console = Console(width=None if sys.stdout.isatty() else 160)
    settings = Settings(timeout_s=given.timeout, niceness=given.nice)
    faults = catalog.load(given.only)
    if not faults:
        console.print("no such script; they are: " + ", ".join(fault.name for fault in catalog.load()))
        return 2
    if given.plants:
        return plants.check(console, faults, settings)
    return (_advice if given.advice else _diagnosis)(console, given, faults, settings)


def _diagnosis(console: Console, given: argparse.Namespace, faults: list[Fault], settings: Settings) -> int:
    budget = Budget(given.time_budget)
    rows = [
        _said(console, lambda f=fault, m=method: measure.diagnose(f, m, given.repeats or 3, settings, budget))
        for fault, method in _cases(faults, given.start_method)
    ]
    return _judge_diagnoses(console, given, rows)


def _judge_diagnoses(console: Console, given: argparse.Namespace, rows: list[verdict.Diagnosis]) -> int:
    tables.show(console, rows)
    tables.show_confusion(console, rows)
    _save(given, rows, tables.markdown(rows))
    if given.causes_only:
        for line in verdict.failed_stall_gates(rows):
            console.print(f"not enforced here: {line}", style="yellow", highlight=False)
        broken = [f"{row.fault.name} did not run" for row in rows if row.outcome == "fail" and row.stall_frac is None]
        failed = verdict.failed_cause_gates(rows) + broken
        for line in failed:
            console.print(f"gate: {line}", style="red", highlight=False)
        return 1 if failed else 0
    return _finish(console, verdict.failed_gates(rows), rows)


def _advice(console: Console, given: argparse.Namespace, faults: list[Fault], settings: Settings) -> int:
    budget = Budget(given.time_budget)
    cases = _cases([fault for fault in faults if fault.fixable], given.start_method)
    rows = [
        _said(console, lambda f=fault, m=method: measure.advise(f, m, given.repeats or 5, settings, budget))
        for fault, method in cases
    ]
    return _judge_advices(console, given, rows)


def _judge_advices(console: Console, given: argparse.Namespace, rows: list[verdict.Advice]) -> int:
    tables.show(console, rows)
    console.print(tables.advice_summary(rows))
    _save(given, rows, tables.markdown(rows))
    expected = (
        min(verdict.MIN_ADVICE_ROWS, sum(row.outcome != "skipped" for row in rows))
        if given.only
        else verdict.MIN_ADVICE_ROWS
    )
    return _finish(console, verdict.failed_advice_gates(rows, expected), rows)


def _again(console: Console, given: argparse.Namespace) -> int:
    saved = [row for path in given.saved for row in json.loads(path.read_text())]
    known = {fault.name: fault for fault in catalog.load()}
    advices = [tables.from_json(verdict.Advice, row, known[row["script"]]) for row in saved if "pairs" in row]
    if advices:
        return _judge_advices(console, given, advices)
    return _judge_diagnoses(
        console, given, [tables.from_json(verdict.Diagnosis, row, known[row["script"]]) for row in saved]
    )


def _said(console: Console, take: Callable[[], Row]) -> Row:
    row = take()
    console.print(*tables.cells(row), style=tables.COLOURS[row.outcome], highlight=False, markup=False)
    return row


def _cases(faults: list[Fault], wanted: str) -> list[tuple[Fault, str]]:
    """Scripts with their start methods; with one that a script does not know, its own first."""
    if wanted == "all":
        return [(fault, method) for fault in faults for method in START_METHODS if method in fault.start_methods]
    return [(fault, wanted if wanted in fault.start_methods else fault.start_methods[0]) for fault in faults]


def _finish(console: Console, failed: list[str], rows: list[verdict.Diagnosis] | list[verdict.Advice]) -> int:
    broken = [row.fault.name for row in rows if row.outcome == "fail" and row.notes]
    for line in failed:
        console.print(f"gate: {line}", style="red", highlight=False)
    unstable = [row.fault.name for row in rows if row.outcome == "not stable"]
    if unstable:
        console.print("not stable: " + ", ".join(unstable), style="yellow")
    skipped = [row.fault.name for row in rows if row.outcome == "skipped"]
    if skipped:
        console.print("skipped: " + ", ".join(skipped), style="dim")
    console.print(
        "gates do not hold" if failed or broken else "no gate failed, rows not stable" if unstable else "all gates hold"
    )
    return 1 if failed or broken else 3 if unstable else 0


def _save(given: argparse.Namespace, rows: list[verdict.Diagnosis] | list[verdict.Advice], markdown: str) -> None:
    if given.json:
        given.json.write_text(json.dumps(tables.as_json(rows), indent=1))
    if given.markdown:
        given.markdown.write_text(markdown)


def _keep_to_cores(num: int) -> None:
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="scripts by part of their name, or causes")
    parser.add_argument("--start-method", choices=[*START_METHODS, "all"], default="fork")
    parser.add_argument("--causes-only", action="store_true", help="fail on wrong causes only; print stall errors")
    parser.add_argument("--advice", action="store_true", help="apply the advised changes")
    parser.add_argument("--plants", action="store_true", help="check the scripts alone, without headrace")
    parser.add_argument("--repeats", type=int, help="truth runs per script (3), or pairs with --advice (5)")
    parser.add_argument("--time-budget", type=float, default=15.0, metavar="MIN", help="no row is repeated after this")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for one command")
    parser.add_argument("--nice", type=int, default=0, help="niceness of the scripts; below 0 needs the right to it")
    parser.add_argument("--saved", type=Path, nargs="+", metavar="FILE", help="rows that --json wrote: measure nothing")
    parser.add_argument("--json", type=Path, help="rows for machines")
    parser.add_argument("--markdown", type=Path, help="tables for the docs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
