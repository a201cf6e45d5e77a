"""When headrace itself fails, the program still runs, its exit code is kept, and one line says what failed."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.process.launching import UNTIL_WATCHED, environment, finished, headrace, run_dirs, running

PROGRAM = ["sh", "-c", UNTIL_WATCHED + "echo ran; exit 6"]


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return environment(tmp_path)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("gather", "headrace: the run cannot be analysed: RuntimeError: gather is broken; what was seen is in {kept}"),
        ("render", "headrace: the report cannot be shown: RuntimeError: render is broken; what was seen is in {kept}"),
        (
            "sampler",
            "headrace: the sampler cannot be started: RuntimeError: sampler is broken; what was seen is in {kept}",
        ),
        ("sampling", "headrace: the sampler failed: no more /proc; what was seen is in {kept}"),
        ("json", "headrace: a.json cannot be written: RuntimeError: json is broken; what was seen is in {kept}"),
    ],
)
def test_part_that_fails(environ, broken, said):
    """Each part that raises costs one line and nothing else; the run directory stays."""
    done = finished(headrace("run", "--json", "a.json", *PROGRAM), environ | {"STUB_FAIL": broken})
    (kept,) = run_dirs(environ)
    assert (done.stdout, done.returncode) == ("ran\n", 6)
    ours = [line for line in done.stderr.splitlines() if not line.startswith(("REPORT", "headrace: wrote"))]
    assert ours == [said.format(kept=kept)]


def test_run_directory_that_cannot_be_made(environ, tmp_path):
    """Without a run directory the program runs unobserved, with the caller's own environment."""
    (tmp_path / "file").write_text("")
    environ["HEADRACE_RUN_ROOT"] = str(tmp_path / "file" / "below")
    done = finished(headrace("run", "sh", "-c", 'echo "$PYTHONPATH$HEADRACE_RUN_DIR"; exit 6'), environ)
    assert (done.stdout, done.returncode) == (environ["PYTHONPATH"] + "\n", 6)
    assert done.stderr.startswith("headrace: the run directory cannot be made; the program runs unobserved: ")
    assert done.stderr.count("\n") == 1


def test_program_that_removes_the_run_directory(environ):
    """Even a program that deletes what headrace wrote keeps its exit code."""
    done = finished(headrace("run", "sh", "-c", 'rm -r "$HEADRACE_RUN_DIR"; exit 6'), environ)
    assert done.returncode == 6
    assert "headrace: end.json cannot be written" in done.stderr


@pytest.mark.slow
def test_stderr_that_nobody_reads(environ):
    """A report that cannot be delivered is given up after two seconds, once."""
    report = environ | {"STUB_REPORT_BYTES": "1000000"}
    with running(headrace("run", "--json", "a.json", "--html", "a.html", *PROGRAM), report) as process:
        assert process.stdout.read() == "ran\n"
        assert process.wait(timeout=10) == 6


def test_stderr_whose_reader_is_gone(environ):
    """`headrace run x 2>&1 | head -1`: a closed pipe changes nothing for the program."""
    with running(headrace("run", "--json", "a.json", "sh", "-c", "read x; exit 6"), environ) as process:
        process.stderr.close()
        process.stdin.close()
        assert process.wait(timeout=30) == 6
    assert os.path.exists("a.json")


@pytest.mark.slow
def test_ctrl_c_during_the_report(environ, tmp_path):
    """Ctrl-C while the report is made: it is left out, the run directory stays, the program's exit code is kept."""
    os.mkfifo(tmp_path / "slow.json")
    with running(headrace("run", "--json", "slow.json", *PROGRAM), environ) as process:
        assert process.stdout.readline() == "ran\n"
        assert process.stderr.readline().startswith("REPORT")  # now it waits for a reader of the pipe
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 6
        (kept,) = run_dirs(environ)
        assert process.stderr.read() == f"headrace: report interrupted; make it again with: headrace report {kept}\n"


@pytest.mark.slow
def test_program_is_started_before_anything_slow(environ):
    """What takes long to import is imported only after the program has started."""
    code = """
import sys
before = set(sys.modules)  # some environments import things at start
from headrace.run import session
heavy = {"typer", "rich", "msgspec", "plotly", "psutil", "pynvml", "torch", "subprocess", "tempfile"}
session.Session.started = lambda self: print(sorted(heavy & (set(sys.modules) - before)), flush=True)
session.Session.finish = lambda self, end: self.discard()
import headrace.cli
headrace.cli.main(["run", "true"])
"""
    assert finished([sys.executable, "-c", code], environ).stdout == "[]\n"
