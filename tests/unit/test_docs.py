"""The docs are tested: commands, options, causes and keys that they name exist, and none is missing."""

import re
import subprocess
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from headrace.options import option_fields
from headrace.records import run as records

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def headings(name):
    return set(re.findall(r"^#+ (.+)$", text(name), re.MULTILINE))


def test_every_option_is_explained_and_no_other():
    """docs/run.md has one row per option of `headrace run`."""
    documented = set(re.findall(r"^\| `(--[a-z-]+)", text("docs/run.md"), re.MULTILINE))
    assert documented == {f"--{field.name}" for field in option_fields()}


def test_every_cause_has_its_section_and_no_other():
    """Each word of the closed list has its signal and its cure."""
    sections = {heading for heading in headings("docs/causes.md") if re.fullmatch("[a-z]+", heading)}
    assert sections == set(get_args(records.CauseName))


@pytest.mark.parametrize("name", READMES)
def test_the_readmes_name_every_cause(name):
    """Whoever reads the report can look its word up on the first page."""
    assert not [cause for cause in get_args(records.CauseName) if f"`{cause}`" not in text(name)]


@pytest.mark.parametrize("struct", [records.Run, records.Process, records.Loader, records.Finding, records.Change])
def test_every_key_of_the_json_is_explained(struct):
    """docs/json.md names every key of the contract."""
    page = text("docs/json.md")
    assert not [f.encode_name for f in msgspec.structs.fields(struct) if not re.search(rf"\b{f.encode_name}\b", page)]


@pytest.mark.parametrize("name", READMES)
def test_make_targets_that_the_readmes_name_exist(name):
    """The two commands, and all others, are real."""
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:\$ |`)make ([a-z-]+)", text(name)))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("name", [*READMES, *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
def test_links_lead_somewhere(name):
    """Every relative link names a file that is there."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[a-z-]+)?\)", text(name))
    assert not [link for link in links if not (ROOT / name).parent.joinpath(link).exists()]


def test_make_knows_its_targets_without_an_environment():
    """`make help` answers on a machine with python3 and make alone."""
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE)) - {"help", "format", "clean"}
    assert not [target for target in targets if target not in done.stdout]
