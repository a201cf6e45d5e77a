"""The planted faults: each script's header, read without importing it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
#: Causes that say "the data holds the device back". compute and outside scripts must never be called one of these.
DATA_CAUSES = frozenset(
    [
        "storage",
        "workers",
        "preprocess",
        "oversubscribed",
        "collate",
        "transport",
        "pin",
        "straggler",
        "epoch",
        "memory",
        "copy",
        "link",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One script. ``header`` is its FAULT dict; see README.md for the keys."""

    path: Path
    header: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def cause(self) -> str:
        return str(self.header["cause"])

    @property
    def accepted(self) -> set[str]:
        """Right answers: the planted cause, and what else the header allows."""
        return {self.cause, *self.header.get("also", [])}

    @property
    def start_methods(self) -> list[str]:
        return list(self.header["start_methods"])

    @property
    def fixable(self) -> bool:
        return "fixed" in self.header


def load(only: list[str] | None = None) -> list[Fault]:
    """All scripts, or those whose name or cause contains one of ``only``."""
    faults = [Fault(path=path, header=header(path)) for path in sorted(SCRIPTS.glob("[0-9][0-9]_*.py"))]
    if not only:
        return faults
    return [fault for fault in faults if any(word in fault.name or word == fault.cause for word in only)]


def header(path: Path) -> dict[str, Any]:
    """The literal dict assigned to FAULT."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "FAULT":
            value = ast.literal_eval(node.value)
            assert isinstance(value, dict)
            return value
    raise ValueError(f"{path} has no FAULT header")
