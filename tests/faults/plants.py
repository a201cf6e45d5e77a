"""Checks the scripts alone: is each planted fault really there, and does its cure work? headrace has no part in it."""

from __future__ import annotations

import processes
from catalog import Fault
from measure import PAIR_S, TRUTH_S
from processes import Settings
from rich.console import Console
from rich.table import Table

MIN_STALL_FRAC = 0.15
MAX_IDLE_STALL_FRAC = 0.05
MIN_GAIN = 1.10
STALLED = frozenset(
    ["storage", "workers", "preprocess", "oversubscribed", "straggler", "collate", "transport", "memory"]
)


def check(console: Console, faults: list[Fault], settings: Settings) -> int:
    """Print stall and gain of each script. Exit code 1 when a fault is not there."""
    table, missing = (
        Table("script", "cause", "step ms", "steady stall", "with epochs", "gain of fix", "others' cores", ""),
        0,
    )
    for fault in faults:
        try:
            cells, good = _row(fault, settings)
        except (processes.Skipped, processes.Broken) as reason:
            cells, good = (fault.name, fault.cause, str(reason)[:400]), isinstance(reason, processes.Skipped)
        console.print(*cells, "" if good else "NOT THERE", highlight=False, markup=False)
        table.add_row(*cells, *[""] * (7 - len(cells)), "" if good else "not there")
        missing += not good
    console.print(table)
    return 1 if missing else 0


def _row(fault: Fault, settings: Settings) -> tuple[tuple[str, ...], bool]:
    method = ["--start-method", fault.start_methods[0]]
    truth = processes.bare(fault, ["--truth", "--seconds", str(TRUTH_S), *method], settings).record
    gain = _gain(fault, method, settings) if fault.fixable else None
    spread = f"{truth['steady_stall_frac']:.1%} ({min(truth['steady']):.1%} to {max(truth['steady']):.1%})"
    numbers = (f"{truth['steady_ns'] / 1e6:.1f}", spread, f"{truth['stall_frac']:.1%}", f"{gain:.2f}" if gain else "")
    return (fault.name, fault.cause, *numbers, f"{truth['outside_cores']:.2f}"), _there(fault, truth, gain)


def _gain(fault: Fault, method: list[str], settings: Settings) -> float:
    clock = f"{fault.header.get('rate', 'steady')}_ns"
    planted, fixed = (
        processes.bare(fault, ["--seconds", str(PAIR_S), *method, *extra], settings).record[clock]
        for extra in ([], ["--fixed"])
    )
    return float(planted / fixed)


def _there(fault: Fault, truth: dict[str, float], gain: float | None) -> bool:
    if fault.cause in STALLED and truth["steady_stall_frac"] < MIN_STALL_FRAC:
        return False
    if fault.cause == "epoch" and truth["stall_frac"] < MIN_STALL_FRAC:
        return False
    if fault.cause == "compute" and truth["steady_stall_frac"] > MAX_IDLE_STALL_FRAC:
        return False
    return gain is None or gain >= MIN_GAIN
