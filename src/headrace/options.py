"""Validated options of ``headrace run``, and everything headrace reads from its environment.

The fields of ``RunOptions`` are the one table of options: ``parse_run`` reads the command line by it, and
the help is made from it. ``parse_run`` exists beside typer because typer takes 30 ms to import, which would delay the
user's program; everything else on the command line goes through typer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from headrace.errors import UsageError

#: Set for the agent in the program's environment; never read by headrace itself.
RUN_DIR_VARIABLE = "HEADRACE_RUN_DIR"
DATA_VARIABLE = "HEADRACE_DATA"

_REPORT_FIELDS = ("json", "html", "trace")
#: A report path with such an ending is a forgotten FILE: ``headrace run --json train.py``.
_PROGRAM_ENDINGS = (".py", ".sh", ".ipynb")


def _option(default: Any, help: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What was asked of ``headrace run``. Raises ``UsageError`` for a value that makes no sense."""

    json: Path | None = _option(None, "Write the record of the run, from which every report can be made again.", "FILE")
    html: Path | None = _option(None, "Write the report as one HTML file.", "FILE")
    trace: Path | None = _option(None, "Write Chrome trace events; opens in Perfetto.", "FILE")
    steps: int | None = _option(None, "Observe N steps, then step out of the way completely.", "N")
    warmup: int = _option(0, "Leave the first N steps out.", "N")
    live: bool = _option(False, "Show step time, stall and cause on one line while the program runs.")
    data: str | None = _option(None, "Treat this function or iterator as the loader.", "MODULE:FUNCTION")
    quiet: bool = _option(False, "No report on stderr.")
    command: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps must be 1 or more, was {self.steps}")
        if self.warmup < 0:
            raise UsageError(f"--warmup must be 0 or more, was {self.warmup}")
        if self.data is not None and not _names_a_function(self.data):
            raise UsageError(f"--data must have the form module:function, e.g. train:get_batch, was {self.data!r}")
        _check_report_paths({f"--{name}": getattr(self, name) for name in _REPORT_FIELDS})
        if not self.command:
            raise UsageError("no program given; put headrace run before your command, e.g. headrace run train.py")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the caller's environment says."""

    run_root: Path | None = None
    """``HEADRACE_RUN_ROOT``: where run directories are made; by default where the platform keeps temporary files."""
    keep: bool = False
    """``HEADRACE_KEEP=1``: the run directory stays after the report."""
    on_worker_death: Literal["restart", "raise"] = "restart"
    """``HEADRACE_ON_WORKER_DEATH``: what a ``Loader`` does by default when one of its workers dies."""
    num_local_ranks: int = 1
    """``LOCAL_WORLD_SIZE``, as torchrun sets it: ranks on this machine, which share its memory."""


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Reads the ``HEADRACE_*`` variables. Raises ``UsageError`` for a value that makes no sense."""
    keep = environ.get("HEADRACE_KEEP", "")
    if keep not in ("", "0", "1"):
        raise UsageError(f"HEADRACE_KEEP must be 1 or 0, was {keep!r}")
    root = environ.get("HEADRACE_RUN_ROOT")
    death = environ.get("HEADRACE_ON_WORKER_DEATH") or "restart"
    if death not in ("restart", "raise"):
        raise UsageError(f"HEADRACE_ON_WORKER_DEATH must be restart or raise, was {death!r}")
    ranks = environ.get("LOCAL_WORLD_SIZE", "")
    return Settings(
        run_root=Path(root) if root else None,
        keep=keep == "1",
        on_worker_death="raise" if death == "raise" else "restart",
        num_local_ranks=int(ranks) if ranks.isascii() and ranks.isdigit() else 1,
    )


def option_fields() -> tuple[Field[Any], ...]:
    """The fields of ``RunOptions`` that are options; ``metadata`` has ``help`` and ``metavar`` (None for a flag)."""
    return tuple(f for f in fields(RunOptions) if f.name != "command")


def parse_run(words: Sequence[str]) -> RunOptions | None:
    """Reads what follows ``headrace run``.

    Args:
        words: Options of headrace; then the program, which begins at the first word that is no option, at ``-m``, or
            after ``--``. All later words belong to it.

    Returns:
        The options, or None when help was asked for.

    Raises:
        UsageError: an unknown option, a missing or bad value, no program, a report that could not be written.
    """
    values: dict[str, Any] = {}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        word = words[at]
        at += 1
        if word == "--":
            break
        if word in ("--help", "-h"):
            return None
        at = _read_option(word, words, at, values)
    return RunOptions(**values, command=tuple(words[at:]))


def check_report_path(option: str, path: Path) -> None:
    """Raises ``UsageError`` when a report could not be written to ``path``. Creates and truncates nothing."""
    if path.suffix in _PROGRAM_ENDINGS:
        raise UsageError(f"{option} needs the name of the report to write, and {path} looks like a program")
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory; name a file in it")
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {folder}; make it first")
    # A regular file is written beside its place and renamed; a pipe or a device is opened.
    target = path if path.exists() and not path.is_file() else folder
    if not os.access(target, os.W_OK):
        raise UsageError(f"{option} {path}: {target} is not writable; name another place")


def near(word: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"``, or nothing when no known word is near."""
    from difflib import get_close_matches

    found = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else ""


def _read_option(word: str, words: Sequence[str], at: int, values: dict[str, Any]) -> int:
    """Puts one option into ``values``; returns the place of the next word."""
    known = {f"--{f.name}": f for f in option_fields()}
    flag, equals, value = word.partition("=")
    if flag not in known:
        raise UsageError(f"unknown option {word} before the program{_hint(flag, known)}")
    metavar = known[flag].metadata["metavar"]
    if metavar is None:
        if equals:
            raise UsageError(f"{flag} takes no value, was {word}")
        values[known[flag].name] = True
        return at
    if not equals:
        if at == len(words):
            raise UsageError(f"{flag} needs a value: {flag} {metavar}")
        value, at = words[at], at + 1
    values[known[flag].name] = _convert(flag, metavar, value)
    return at


def _hint(flag: str, known: Iterable[str]) -> str:
    hint = near(flag, known)
    if not hint and flag == "-c":
        return "; did you mean headrace run python -c ...?"
    return hint or "; headrace run --help lists the options"


def _convert(flag: str, metavar: str, value: str) -> Any:
    if value == "":
        raise UsageError(f"{flag} needs a value: {flag} {metavar}")
    if metavar == "FILE":
        return Path(value)
    if metavar == "N":
        if not (value.removeprefix("-").isascii() and value.removeprefix("-").isdigit()):
            raise UsageError(f"{flag} needs a whole number, was {value!r}")
        return int(value)
    return value


def _names_a_function(text: str) -> bool:
    module, colon, function = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *function.split(".")])


def _check_report_paths(paths: Mapping[str, Path | None]) -> None:
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        check_report_path(option, path)
        other = seen.setdefault(path.absolute(), option)
        if other != option:
            raise UsageError(f"{other} and {option} name the same file {path}; give each its own")
