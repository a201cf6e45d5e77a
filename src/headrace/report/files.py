"""Saved runs: read one back, and write a run as JSON, HTML or trace.

A file appears whole or not at all: it is written beside its place and then renamed over it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import RecordError
from headrace.records.run import RUN_FORMAT, Run

_FAMILY, _VERSION = RUN_FORMAT.split("/")


class _Head(msgspec.Struct):
    format: Any = None


def load(path: Path) -> Run:
    """Reads a saved run. Unknown keys are ignored.

    Raises:
        RecordError: the file is missing or unreadable, is not JSON, is not a headrace run, was written by a newer
            headrace, or holds a value of a wrong type; always one line.
    """
    data = _read(path)
    _check_format(path, data)
    try:
        return msgspec.json.decode(data, type=Run)
    except msgspec.ValidationError as error:
        raise RecordError(f"{path}: damaged run: {error}") from error


def write_json(run: Run, path: Path) -> None:
    """Writes the record itself.

    Raises:
        RecordError: the place cannot be written to; what was there before is still there.
    """
    _write(path, _encode(run))


def write_html(run: Run, path: Path) -> None:
    """Writes the report as one HTML file that needs no network. Raises like ``write_json``."""
    from headrace.report.html import make_html  # jinja2 takes 30 ms to import and most runs write no HTML

    _write(path, make_html(run).encode("utf-8", "replace"))


def write_trace(run: Run, path: Path) -> None:
    """Writes Chrome trace events, which Perfetto opens. Raises like ``write_json``."""
    from headrace.report.trace import make_trace

    _write(path, _encode(make_trace(run)))


def _encode(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value) + b"\n"
    except UnicodeEncodeError:
        # A path on Linux may hold bytes that are no UTF-8; Python keeps them as lone surrogates, JSON has no place
        # for them. They become "?", and the rest of the run is kept.
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace") + b"\n"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RecordError(f"{path}: no such file") from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error


def _check_format(path: Path, data: bytes) -> None:
    """Tells apart what is not JSON, what is JSON but not ours, and what is newer than we are."""
    try:
        found = msgspec.json.decode(data, type=_Head).format
    except msgspec.ValidationError:
        found = None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordError(f"{path}: not JSON: {_broken(data, error)}") from None
    family, _, version = str(found).partition("/")
    if family != _FAMILY or not version.isdecimal():
        raise RecordError(f'{path}: not a headrace run: its "format" should be "{RUN_FORMAT}"')
    if int(version) > int(_VERSION):
        raise RecordError(f"{path}: format {found} was written by a newer headrace; upgrade headrace to read it")
    if found != RUN_FORMAT:
        raise RecordError(f"{path}: format {found} is not known; this headrace reads {RUN_FORMAT}")


def _broken(data: bytes, error: Exception) -> str:
    if not data.strip():
        return "the file is empty"
    if "truncated" in str(error):
        return f"truncated at byte {len(data)}"
    return str(error).removeprefix("JSON is malformed: ")


def _write(path: Path, data: bytes) -> None:
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or /dev/stdout is written to; renaming over it would replace the device
        else:
            _replace(path.resolve(), data)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from error


def _replace(target: Path, data: bytes) -> None:
    beside = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
    try:
        # Exclusive, so that a planted link is never followed; 0o666 lets the caller's umask decide, as open() does.
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
