"""What is accepted after `headrace run`, and what is refused with which words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, UsageError
from headrace.options import RunOptions, check_report_path, option_fields, parse_run, read_settings


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train.py", "--help", "--", "-m", "--json", "x"], ("train.py", "--help", "--", "-m", "--json", "x")),
        (["--quiet", "torchrun", "--quiet"], ("torchrun", "--quiet")),
        (["-m", "pkg.mod", "--steps", "3"], ("-m", "pkg.mod", "--steps", "3")),
        (["--steps", "3", "-m", "pkg.mod"], ("-m", "pkg.mod")),
        (["--", "accelerate", "launch"], ("accelerate", "launch")),
        (["--live", "--", "-m", "mod"], ("-m", "mod")),
    ],
)
def test_program_begins_at_the_first_word_that_is_no_option(words, command):
    """All words from the program on belong to it, whatever they look like."""
    assert parse_run(words).command == command


def test_every_option_is_read(tmp_path):
    """Options may be written with a space or with "=", and arrive with their types."""
    line = f"--json {tmp_path}/a.json --html={tmp_path}/a.html --trace {tmp_path}/t --steps=5 --warmup 2"
    options = parse_run(f"{line} --live --data pkg.train:Loader.batch --quiet x".split())
    assert options == RunOptions(
        json=tmp_path / "a.json",
        html=tmp_path / "a.html",
        trace=tmp_path / "t",
        steps=5,
        warmup=2,
        live=True,
        data="pkg.train:Loader.batch",
        quiet=True,
        command=("x",),
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--jsn", "x", "t.py"], "unknown option --jsn before the program; did you mean --json?"),
        (["--frobnicate", "t.py"], "headrace run --help"),
        (["-c", "print()"], "headrace run python -c"),
        ([], "no program given"),
        (["--quiet"], "no program given"),
        (["--"], "no program given"),
        (["--json"], "--json needs a value: --json FILE"),
        (["--json=", "t.py"], "--json needs a value"),
        (["--json", "train.py"], "looks like a program"),
        (["--quiet=yes", "t.py"], "--quiet takes no value, was --quiet=yes"),
        (["--steps", "many", "t.py"], "--steps needs a whole number, was 'many'"),
        (["--steps", "0", "t.py"], "--steps must be 1 or more, was 0"),
        (["--steps", "1.5", "t.py"], "whole number"),
        (["--warmup", "-1", "t.py"], "--warmup must be 0 or more, was -1"),
        (["--data", "get_batch", "t.py"], "module:function"),
        (["--data", "a:b:c", "t.py"], "module:function"),
        (["--data", ":f", "t.py"], "module:function"),
    ],
)
def test_wrong_use_is_said_in_one_line(words, said):
    """The message names what was wrong and what to do, and fits one line."""
    with pytest.raises(UsageError) as caught:
        parse_run(words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_help_before_the_program_is_headraces_own():
    """`--help` asks headrace before the program, and the program after its first word."""
    assert parse_run(["--quiet", "--help", "x.py"]) is None
    assert parse_run(["-h"]) is None
    assert parse_run(["x.py", "--help"]) is not None


class TestReportPath:
    def test_good_path_is_left_alone(self, tmp_path):
        """Checking a path creates nothing and truncates nothing."""
        old = tmp_path / "old.json"
        old.write_text("kept")
        check_report_path("--json", old)
        check_report_path("--json", tmp_path / "new.json")
        assert old.read_text() == "kept"
        assert os.listdir(tmp_path) == ["old.json"]

    def test_missing_directory(self, tmp_path):
        """A directory that does not exist is named."""
        with pytest.raises(UsageError, match=r"there is no directory .*nowhere"):
            check_report_path("--json", tmp_path / "nowhere" / "a.json")

    def test_directory(self, tmp_path):
        """A directory in place of a file is refused."""
        with pytest.raises(UsageError, match="is a directory"):
            check_report_path("--html", tmp_path)

    def test_not_writable(self, tmp_path, monkeypatch):
        """A place that may not be written to is refused; os.access knows read-only file systems too."""
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(UsageError, match="is not writable"):
            check_report_path("--trace", tmp_path / "t.json")

    def test_device(self):
        """A device or a pipe is written to, so it is the device that must be writable."""
        check_report_path("--json", Path("/dev/null"))

    def test_same_file_twice(self, tmp_path):
        """Two reports cannot go to one file."""
        with pytest.raises(UsageError, match="--json and --html name the same file"):
            parse_run(["--json", f"{tmp_path}/a", "--html", f"{tmp_path}/a", "t.py"])


def test_settings_come_from_the_environment():
    """HEADRACE_RUN_ROOT and HEADRACE_KEEP are read; empty means not set."""
    assert read_settings({}) == read_settings({"HEADRACE_RUN_ROOT": "", "HEADRACE_KEEP": "0"})
    settings = read_settings({"HEADRACE_RUN_ROOT": "/x", "HEADRACE_KEEP": "1"})
    assert (settings.run_root, settings.keep) == (Path("/x"), True)
    with pytest.raises(UsageError, match="HEADRACE_KEEP must be 1 or 0, was 'yes'"):
        read_settings({"HEADRACE_KEEP": "yes"})


def test_every_option_has_a_help_text():
    """The table of options is the help: no option without a sentence."""
    assert all(field.metadata["help"].endswith(".") for field in option_fields())


def test_usage_errors_are_value_errors():
    """Who calls headrace from code can catch wrong use as ValueError, and everything of ours at the root."""
    assert issubclass(UsageError, ValueError)
    assert issubclass(UsageError, HeadraceError)


def test_version_is_written_once_in_two_places():
    """`headrace.__version__` equals the version in pyproject.toml."""
    import headrace

    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{headrace.__version__}"\n' in project
