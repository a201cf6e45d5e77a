"""Saved runs come back as they were, and a bad file gets one clear line."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from headrace.errors import RecordError
from headrace.records import schema
from headrace.records.run import Run
from headrace.report import files
from tests.report import report_builders as builders
from tests.report.strategies import records


@cache
def validator() -> Any:
    published = json.loads((Path(schema.__file__).parent / schema.SCHEMA_NAME).read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


def test_published_schema_is_the_generated_one() -> None:
    """The schema in the package is what the types say today."""
    published = (Path(schema.__file__).parent / schema.SCHEMA_NAME).read_text()
    assert published == schema.schema_text(), "renew it: python -m headrace.records.schema"


def test_schema_lists_the_closed_enumerations() -> None:
    """Causes, confidences and the parts of the time are closed in the published schema."""
    found = schema.make_schema()["$defs"]
    assert found["Finding"]["properties"]["confidence"]["enum"] == ["high", "low", "medium"]
    assert "storage" in found["Finding"]["properties"]["cause"]["enum"]
    assert set(found["TimeFrac"]["required"]) == set(found["TimeFrac"]["properties"])


@pytest.mark.parametrize("name", builders.SMALL)
def test_a_written_run_is_valid_and_comes_back(name: str, tmp_path: Path) -> None:
    """Every written file fits the published schema and reads back as the same run."""
    run, path = builders.SMALL[name](), tmp_path / "run.json"
    files.write_json(run, path)
    validator().validate(json.loads(path.read_bytes()))
    assert files.load(path) == run


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(run=records(Run))
def test_any_run_is_valid_and_comes_back(run: Run, tmp_path: Path) -> None:
    """Whatever a run holds, its file fits the schema and reads back the same."""
    path = tmp_path / "any.json"
    files.write_json(run, path)
    validator().validate(json.loads(path.read_bytes()))
    assert files.load(path) == run


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    """A file with keys that a later headrace added is read, and still valid."""
    raw = json.loads(msgspec.json.encode(builders.SMALL["storage"]()))
    raw["later"] = 1
    raw["processes"][0]["loaders"][0]["finding"]["later"] = {"a": [1]}
    path = tmp_path / "later.json"
    path.write_text(json.dumps(raw))
    validator().validate(raw)
    assert files.load(path) == builders.SMALL["storage"]()


GOOD = msgspec.json.encode(builders.storage(3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON: the file is empty"),
        (GOOD[:700], "not JSON: truncated at byte 700"),
        (b"{oops}", r"not JSON: .*byte 1"),
        (b"\xff\xfe\x00", "not JSON: "),
        (b'{"a":' + b"[" * 100_000, "not JSON: "),
        (b"[1, 2]", "not a headrace run"),
        (b'{"a": 1}', "not a headrace run"),
        (b'{"format": "other/1"}', "not a headrace run"),
        (b'{"format": 7}', "not a headrace run"),
        (b'{"format": "headrace.run/2"}', "headrace.run/2 was written by a newer headrace; upgrade"),
        (b'{"format": "headrace.run/0"}', "headrace.run/0 is not known"),
        (
            b'{"format": "headrace.run/1", "headrace": "1", "command": [], "ended": "later"}',
            r"damaged run: .*\$\.ended",
        ),
        (GOOD.replace(b'"pid":4711', b'"pid":"x"', 1), r"damaged run: .*`\$\.processes\[0\]\.pid`"),
        (b'{"format": "headrace.run/1"}', "damaged run: .*missing required field"),
    ],
    ids=lambda value: value[:24].decode("ascii", "replace") if isinstance(value, bytes) else "",
)
def test_a_bad_file_gets_one_clear_line(data: bytes, message: str, tmp_path: Path) -> None:
    """A damaged, foreign or newer file is refused with one line that names the file and what is wrong."""
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(RecordError, match=message) as caught:
        files.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 160


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    """A file that is not there or cannot be read is named."""
    with pytest.raises(RecordError, match=r"none.json: no such file"):
        files.load(tmp_path / "none.json")
    with pytest.raises(RecordError, match=re.escape(f"{tmp_path}: cannot be read: Is a directory")):
        files.load(tmp_path)


@pytest.mark.parametrize("write", [files.write_json, files.write_html, files.write_trace])
def test_a_failed_write_loses_nothing(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full in the middle, the old file is whole and nothing else is left."""
    path = tmp_path / "report"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match="cannot be written: No space left"):
        write(builders.unknown(), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A directory that does not exist gets one line."""
    with pytest.raises(RecordError, match=r"no/run\.json: cannot be written: No such file or directory"):
        files.write_json(builders.nothing(), tmp_path / "no" / "run.json")


def test_pipes_and_links_stay_what_they_are(tmp_path: Path) -> None:
    """Writing to a device or pipe writes into it; a link keeps pointing at the file that it names."""
    files.write_json(builders.nothing(), Path(os.devnull))
    assert Path(os.devnull).is_char_device()
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    files.write_json(builders.nothing(), link)
    assert link.is_symlink()
    assert files.load(target) == builders.nothing()


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    """A report is as readable as any file that the person makes."""
    old = os.umask(0o027)
    try:
        files.write_json(builders.nothing(), tmp_path / "run.json")
    finally:
        os.umask(old)
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o640


def test_names_that_are_no_utf8_do_not_lose_the_run(tmp_path: Path) -> None:
    """A path with bytes that are no UTF-8 becomes "?", in every kind of file."""
    run = builders.storage(5)
    run.command = ["python", os.fsdecode(b"caf\xe9.py")]
    files.write_json(run, tmp_path / "run.json")
    assert files.load(tmp_path / "run.json").command == ["python", "caf?.py"]
    files.write_html(run, tmp_path / "run.html")
    files.write_trace(run, tmp_path / "run.trace.json")
