"""Runs a directory of small programs, each with one expectation of a loader, against ``headrace.Loader``.

    python tests/loader/run_cases.py                  all of them, one after another
    python tests/loader/run_cases.py --only 12,34     some, by number or part of the name
    python tests/loader/run_cases.py --list           their names

The directory is ``HEADRACE_CASES``, or ``../shared/cases`` beside the checkout; with neither, nothing runs and the exit
code is 0. Its own ``run_all.py`` runs each program in a process of its own; this script gives the options that a case
has to ask for, and knows which cases cannot pass, and why.

Exit code 0 when every case passed or is a known exception; 1 when one failed, hung, left something behind or skipped
itself for a reason that is not known, or when a known exception ends otherwise; 2 for wrong use.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
LOADER = "headrace:Loader"
#: Case number -> why it cannot pass. It runs all the same.
CANNOT_PASS = {
    "56": "contradicts itself for num_workers=0, shuffled, no generator: the second pass has to come in the order that "
    "DataLoader draws after the dataset has drawn from the global generator, which has to be left undrawn",
}
#: Of these, how the last line begins: any other end is a failure.
LAST_LINES = {"56": "AssertionError: ('order', {'num_workers': 0, 'shuffle': True, 'gen': False,"}
#: Case number -> options that it says have to be asked for.
OPTIONS = {"90": {"read_ahead_epochs": True}}
#: Pattern of case numbers -> what they need; without it they skip themselves.
MAY_SKIP = {
    "G*": "needs a GPU",
    "72": "needs two CPUs",
    "89": "needs the right to mount a small /dev/shm",
    "A7": "needs fork as the default start method",
}


@dataclass(frozen=True)
class Judged:
    """What became of one case, and whether that is as it should be."""

    is_fine: bool
    status: str


def main() -> int:
    """Run what the command line asks for; the exit code says how it went."""
    given = _arguments()
    directory = Path(os.environ.get("HEADRACE_CASES") or CHECKOUT.parent / "shared" / "cases")
    if not (directory / "run_all.py").is_file():
        if os.environ.get("HEADRACE_CASES"):
            print(f"HEADRACE_CASES: there is no run_all.py in {directory}", file=sys.stderr)
            return 2
        print(f"no cases in {directory}: nothing to run (HEADRACE_CASES names another directory)")
        return 0
    names = _names(directory, [word for word in given.only.split(",") if word])
    if not names:
        print(f"no such case in {directory}; --list shows their names", file=sys.stderr)
        return 2
    if given.list:
        print("\n".join(names))
        return 0
    judged = [_judge(_run(directory, name, given.timeout)) for name in names]
    num_bad = sum(not case.is_fine for case in judged)
    num_skipped = sum(case.status == "skip" for case in judged)
    print(f"{len(judged) - num_bad} of {len(judged)} as expected ({num_skipped} skipped), {num_bad} not")
    return 1 if num_bad else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the loader cases against headrace.Loader.")
    parser.add_argument("--only", default="", help="numbers or parts of names, with commas between them")
    parser.add_argument("--timeout", type=float, default=40, help="seconds for each case (40)")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    return parser.parse_args()


def _names(directory: Path, wanted: list[str]) -> list[str]:
    # The pattern is that of run_all.py.
    names = sorted(path.stem for path in directory.glob("[0-9ABG][0-9]*_*.py"))
    return [
        name
        for name in names
        if not wanted or any(name.startswith(word + "_") or (len(word) > 2 and word in name) for word in wanted)
    ]


def _run(directory: Path, name: str, timeout_s: float) -> dict[str, Any]:
    """One case's row of run_all.py's results."""
    environ = {**os.environ, "LOADER_IMPORT": LOADER}
    environ.pop("LOADER_EXTRA", None)
    if options := OPTIONS.get(_number(name)):
        environ["LOADER_EXTRA"] = json.dumps(options)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        command = [sys.executable, "run_all.py", "--only", name, "--timeout", str(timeout_s), "--json", str(results)]
        done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)
        rows = json.loads(results.read_text())["cases"] if results.is_file() else []
    for row in rows:
        if row["name"] == name:
            return dict(row)
    return {"name": name, "status": "fail", "wall_s": 0.0, "last": "", "tail": done.stdout + done.stderr}


def _judge(row: dict[str, Any]) -> Judged:
    """Compare a case's outcome with what is known of it, and print it at once."""
    number, status = _number(row["name"]), row["status"]
    left = [f"left {row[key]} behind" for key in ("left_processes", "left_shm") if row.get(key)]
    if number in CANNOT_PASS:
        is_fine = status == "fail" and row["last"].startswith(LAST_LINES[number])
        text = CANNOT_PASS[number] if is_fine else f"known to fail otherwise: {CANNOT_PASS[number]}"
    elif status == "skip":
        known = next((why for pattern, why in MAY_SKIP.items() if fnmatch.fnmatch(number, pattern)), None)
        is_fine, text = known is not None, known or f"not among those that may: {row['last']}"
    else:
        is_fine, text = status == "pass", ""
    judged = Judged(is_fine and not left, status)
    text = "; ".join(part for part in [text, *left] if part)
    mark = "ok " if judged.is_fine else "BAD"
    print(f"{mark} {status:5} {row['wall_s']:6.1f} s  {row['name']:40} {text}".rstrip(), flush=True)
    if not judged.is_fine and status in ("fail", "hang"):
        print("    | " + row.get("tail", "").replace("\n", "\n    | "), flush=True)
    return judged


def _number(name: str) -> str:
    return name.partition("_")[0]


if __name__ == "__main__":
    sys.exit(main())
