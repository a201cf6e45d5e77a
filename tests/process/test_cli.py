"""The command line: help is quick, wrong use is one clear line with exit code 2, results go to stdout."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from headrace.options import option_fields
from tests.process.launching import environment, finished

HEADRACE = [sys.executable, "-m", "headrace"]


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return environment(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "gone.py"], "headrace: no such script: gone.py"),
        (["run", "no-such-command-at-all"], "headrace: no such command: no-such-command-at-all is not on PATH"),
        (["run", "--jsn", "x", "true"], "headrace: unknown option --jsn before the program; did you mean --json?"),
        (
            ["run", "--json", "no/where.json", "touch", "ran"],
            "headrace: --json no/where.json: there is no directory no",
        ),
        (["run", "--steps", "x", "touch", "ran"], "headrace: --steps needs a whole number, was 'x'"),
        (["run", "--data", "x", "touch", "ran"], "headrace: --data must have the form module:function"),
        (["run"], "headrace: no program given"),
        (["report", "gone.json"], "headrace: no such file or run directory: gone.json"),
        (["report", "."], "headrace: . is not a run directory"),
        (["report", "damaged.json"], "headrace: damaged.json: not JSON"),
        (["report", "newer.json"], "headrace: newer.json: format headrace.run/2 was written by a newer headrace"),
        (
            ["report", "damaged.json", "--html", "no/where.html"],
            "headrace: --html no/where.html: there is no directory no",
        ),
        (["report"], "headrace: Missing argument 'PATH'"),
        (["attach", "abc"], "headrace: Invalid value for 'PID'"),
        (["attach", "--secnds", "3", "4"], "headrace: No such option: --secnds"),
        (["atach", "4"], "headrace: No such command 'atach'"),
        (["--no-such-option"], "headrace: No such option: --no-such-option"),
    ],
)
def test_wrong_use(tmp_path, environ, words, said):
    """One line on stderr that says what was wrong; exit code 2; nothing was run, nothing was written."""
    (tmp_path / "damaged.json").write_text('{"format": "headrace.run/1", ')
    (tmp_path / "newer.json").write_text('{"format": "headrace.run/2"}')
    before = sorted(os.listdir(tmp_path))
    done = finished([*HEADRACE, *words], environ)
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert (done.stdout, done.returncode) == ("", 2)
    assert sorted(os.listdir(tmp_path)) == before


def test_bad_setting_in_the_environment(environ):
    """A HEADRACE_ variable with a value that makes no sense is wrong use, too."""
    done = finished([*HEADRACE, "run", "true"], environ | {"HEADRACE_KEEP": "maybe"})
    assert (done.stderr, done.returncode) == ("headrace: HEADRACE_KEEP must be 1 or 0, was 'maybe'\n", 2)


@pytest.mark.slow
def test_help_lists_every_verb_and_option(environ):
    """The help is made from the same table that the command line is read by."""
    overview = finished([*HEADRACE, "--help"], environ)
    assert overview.returncode == 0
    assert finished(HEADRACE, environ).stdout == overview.stdout
    for verb in ("run", "attach", "report", "demo"):
        assert f"\n  {verb} " in overview.stdout
        assert finished([*HEADRACE, verb, "--help"], environ).returncode == 0
    of_run = finished([*HEADRACE, "run", "--quiet", "--help"], environ).stdout
    for field in option_fields():
        assert f"--{field.name} {field.metadata['metavar'] or ''}".strip() in of_run


@pytest.mark.slow
def test_version(environ):
    """--version says one line on stdout."""
    import headrace

    done = finished([*HEADRACE, "--version"], environ)
    assert (done.stdout, done.returncode) == (f"headrace {headrace.__version__}\n", 0)


@pytest.mark.slow
def test_help_is_quick(tmp_path, environ):
    """`headrace --help` takes less than 200 ms, once its modules are compiled.

    CPU time and the best of five: a busy machine must not fail a test. Wall time is measured in benchmarks.
    """
    environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
    used_s = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*HEADRACE, "--help"], env=environ, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(used_s[1:]) < 0.200


@pytest.mark.slow
def test_import_and_report_need_no_torch(environ):
    """`import headrace`, the command line and the reports never import torch."""
    code = (
        "import sys, headrace, headrace.cli, headrace.commands, headrace.report.files, headrace.report.terminal\n"
        "print([m for m in ('torch', 'numpy', 'plotly') if m in sys.modules])\n"
    )
    assert finished([sys.executable, "-c", code], environ).stdout == "[]\n"


@pytest.mark.slow
def test_report_shows_a_saved_run(tmp_path, environ):
    """`headrace report FILE` prints text on stdout; --json, --html and --trace write files instead."""
    (tmp_path / "run.json").write_text(
        json.dumps({"format": "headrace.run/1", "headrace": "0.1.0", "command": ["train.py"], "ended": "exit"})
    )
    shown = finished([*HEADRACE, "report", "run.json"], environ)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("headrace: ")
    written = finished([*HEADRACE, "report", "run.json", "--json", "again.json", "--trace", "trace.json"], environ)
    assert (written.returncode, written.stdout) == (0, "")
    assert written.stderr == "headrace: wrote again.json\nheadrace: wrote trace.json\n"
    assert json.loads((tmp_path / "again.json").read_text())["command"] == ["train.py"]
    json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.slow
def test_report_into_a_pipe_that_closes(tmp_path, environ):
    """`headrace report x.json | head -0` ends quietly."""
    (tmp_path / "run.json").write_text(
        json.dumps({"format": "headrace.run/1", "headrace": "0.1.0", "command": ["train.py"], "ended": "exit"})
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    with subprocess.Popen(
        [*HEADRACE, "report", "run.json"], env=environ, stdout=write_end, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(write_end)
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 1
