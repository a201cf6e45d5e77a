"""`headrace run` starts the program as if headrace were not there, and ends as the program ended."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys

import pytest

from tests.process.launching import SRC, UNTIL_WATCHED, environment, finished, headrace, run_dirs, running

#: Writes everything a program can see of how it was started, to the file named by its first argument.
LOOK_AROUND = """
import json, os, sys
own = {"PYTHONPATH", "HEADRACE_RUN_DIR", "HEADRACE_RUN_ROOT", "_", "SHLVL"}
mask = os.umask(0); os.umask(mask)
RUN_DIR = os.environ.get("HEADRACE_RUN_DIR", "none of these")  # what the agent has open there is its own business
def targets():
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        yield fd, target if int(fd) > 2 else target.split(":")[0]
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "file": globals().get("__file__"),
    "package": __package__, "cwd": os.getcwd(), "path": sys.path, "executable": sys.executable,
    "environ": {k: v for k, v in os.environ.items() if k not in own}, "umask": mask, "sid": os.getsid(0),
    "nice": os.nice(0), "stdin": sys.stdin and sys.stdin.read(),
    "closed": [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "fds": sorted(f"{fd} {target}" for fd, target in targets() if RUN_DIR not in target or int(fd) < 3),
    "signals": [line for line in open("/proc/self/status") if line.startswith("Sig")],
    "modules": sorted(m for m in sys.modules if m.startswith("headrace")),
}
json.dump(seen, open(sys.argv[1], "w"))
print("out")
print("err", file=sys.stderr)
sys.exit(7)
"""

LONG_ENOUGH = ["sh", "-c", UNTIL_WATCHED]


@pytest.fixture
def environ(tmp_path):
    return environment(tmp_path)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working directory of its own, so that relative names mean something."""
    folder = tmp_path / "work"
    (folder / "pkg").mkdir(parents=True)
    (folder / "look.py").write_text(LOOK_AROUND)
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "look.py").write_text(LOOK_AROUND)
    monkeypatch.chdir(folder)
    return folder


def script(work, text, name="prog.py"):
    (work / name).write_text(text)
    return name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bare", "under"),
    [
        (["python", "look.py"], ["look.py"]),
        (["python", "./look.py"], ["python", "./look.py"]),
        (["python", "-m", "pkg.look"], ["-m", "pkg.look"]),
    ],
)
def test_program_sees_what_it_always_saw(work, environ, bare, under):
    """argv, __main__, working directory, import path, environment, descriptors, mask: equal to a bare run."""
    args = ["--help", "--", "-m", "a b", "--json"]
    alone = finished([*bare, "bare.json", *args], environ, input="typed")
    watched = finished(headrace("run", "--quiet", *under, "bare.json", *args), environ, input="typed")
    expected = json.loads((work / "bare.json").read_text())
    finished(headrace("run", *under, "seen.json", *args), environ, input="typed")
    seen = json.loads((work / "seen.json").read_text().replace("seen.json", "bare.json"))
    assert seen == expected
    assert seen["stdin"] == "typed"
    assert (watched.stdout, watched.stderr, watched.returncode) == (alone.stdout, alone.stderr, alone.returncode)


@pytest.mark.slow
@pytest.mark.parametrize(
    "closing",
    [
        "0<&-",
        "1>&-",
        "2>&-",
        "0<&- 1>&- 2>&-",
    ],
)
def test_closed_standard_streams_stay_closed(work, environ, closing):
    """A caller that closed stdin, stdout or stderr gets the same descriptors in the program, and its exit code."""
    seen = []
    for command in (["python", "look.py"], headrace("run", "look.py")):
        done = finished(["sh", "-c", f'exec "$@" {closing}', "sh", *command, "seen.json"], environ, input="")
        assert done.returncode == 7
        seen.append(json.loads((work / "seen.json").read_text()))
    assert seen[0] == seen[1]
    assert run_dirs(environ) == []


def test_report_goes_to_stderr_after_the_program(work, environ):
    """stdout belongs to the program; the report is the last thing on stderr."""
    done = finished(headrace("run", "look.py", "x.json"), environ, input="")
    assert done.stdout == "out\n"
    assert done.stderr == "err\nREPORT ended=exit exit_code=7 signal=None\n"
    assert done.returncode == 7


def test_quiet_writes_the_files_only(work, environ):
    """--quiet: nothing of headrace on stderr; reports asked for are written."""
    done = finished(
        headrace("run", "--quiet", "--json", "a.json", "--html", "a.html", "--trace", "a.trace", *LONG_ENOUGH), environ
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert (work / "a.json").read_text() == f"json of {LONG_ENOUGH} [\"sampler ['started', 'stopped']\"]"
    assert (work / "a.html").exists()
    assert (work / "a.trace").exists()


@pytest.mark.parametrize("code", [0, 1, 2, 77, 255])
def test_exit_code_is_the_programs(environ, code):
    """headrace ends with the program's exit code."""
    assert finished(headrace("run", "--quiet", "sh", "-c", f"exit {code}"), environ).returncode == code


@pytest.mark.parametrize(
    "name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGINT", "SIGPIPE", "SIGHUP", "SIGRTMIN"]
)
def test_death_by_signal_is_the_programs(work, environ, name):
    """A program that dies by a signal: headrace reports, then dies by the same one, and leaves no core file."""
    number = int(getattr(signal, name))
    kill = f"import os, signal; signal.signal({number}, 0) if {number} != 9 else 0; os.kill(os.getpid(), {number})"
    done = finished(headrace("run", sys.executable, "-c", kill), environ)
    assert done.returncode == -number
    assert done.stderr == f"REPORT ended=signal exit_code=None signal={number}\n"
    assert sorted(os.listdir(work)) == ["look.py", "pkg"]


def test_shell_script_with_and_without_a_first_line(work, environ):
    """A script by path is executed; one without "#!" by sh, as a shell would."""
    for text in ("#!/bin/sh\necho $# $1\n", "echo $# $1\n"):
        (work / "go").write_text(text)
        (work / "go").chmod(0o755)
        assert finished(headrace("run", "--quiet", "./go", "a b", "c"), environ).stdout == "2 a b\n"


def test_process_group_is_shared(work, environ):
    """The program is a child in headrace's own process group."""
    ask = script(work, "import os; print(os.getppid(), os.getpgrp())")
    with running(headrace("run", "--quiet", ask), environ, start_new_session=True) as process:
        out, _ = process.communicate(timeout=30)
    assert out.split() == [str(process.pid)] * 2


def test_program_that_cannot_be_executed(work, environ):
    """What the kernel refuses is wrong use: one line, exit code 2, no run directory left."""
    (work / "odd").write_text("#!/no/such/interpreter\n")
    (work / "odd").chmod(0o755)
    done = finished(headrace("run", "./odd"), environ)
    assert done.returncode == 2
    assert done.stderr == "headrace: ./odd cannot be started: No such file or directory\n"
    assert run_dirs(environ) == []


def test_background_process_is_not_waited_for(work, environ):
    """A grandchild that keeps the program's stdout open does not keep headrace."""
    read_end, write_end = os.pipe()
    leave = script(
        work,
        f"import subprocess, sys\n"
        f"p = subprocess.Popen(['sh', '-c', 'read x; echo late'], stdin={read_end})\n"
        f"p.returncode = 0\nsys.exit(3)\n",
    )
    with running(headrace("run", "--quiet", leave), environ, pass_fds=[read_end]) as process:
        os.close(read_end)
        assert process.wait(timeout=30) == 3
        os.close(write_end)  # only now does the grandchild end
        assert process.stdout.read() == "late\n"


class TestRunDirectory:
    KEEP = 'cp -rp "$HEADRACE_RUN_DIR" kept; stat -c %a "$HEADRACE_RUN_DIR"; echo "$HEADRACE_DATA"'

    def test_is_private_and_removed(self, work, environ):
        """The run directory is readable by its owner alone and goes after the report."""
        done = finished(headrace("run", "--quiet", "sh", "-c", self.KEEP), environ)
        assert done.stdout.split() == ["700"]
        assert run_dirs(environ) == []

    def test_holds_the_control_cells(self, work, environ):
        """4096 bytes of cells, --steps and --warmup in them, before the program's first line."""
        finished(headrace("run", "--quiet", "--steps", "30", "--warmup", "5", "sh", "-c", self.KEEP), environ)
        cells = memoryview((work / "kept" / "control").read_bytes()).cast("Q")
        assert (len(cells), cells[:4].tolist()) == (512, [0, 0, 30, 5])

    def test_stays_when_asked(self, work, environ):
        """HEADRACE_KEEP=1 keeps it and says where; run.json and end.json are whole, secrets are not in them."""
        done = finished(
            headrace("run", "sh", "-c", UNTIL_WATCHED + "exit 4", "--token", "abc"), environ | {"HEADRACE_KEEP": "1"}
        )
        (kept,) = run_dirs(environ)
        assert f"headrace: kept {kept}\n" in done.stderr
        header, end = (json.loads((kept / name).read_text()) for name in ("run.json", "end.json"))
        assert header["command"] == ["sh", "-c", UNTIL_WATCHED + "exit 4", "--token", "***"]
        assert header["format"] == "headrace.rundir/1"
        assert (end["ended"], end["exit_code"], end["sampler_cpu_ns"]) == ("exit", 4, 7)
        assert end["ended_mono_ns"] > header["started_mono_ns"]
        assert stat.S_IMODE(kept.stat().st_mode) == 0o700

    def test_data_reaches_the_agent(self, work, environ):
        """--data travels in the environment; one of an outer run does not leak in."""
        command = ["sh", "-c", 'echo "$HEADRACE_DATA"']
        done = finished(headrace("run", "--quiet", "--data", "train:get_batch", *command), environ)
        assert done.stdout == "train:get_batch\n"
        leaked = finished(headrace("run", "--quiet", *command), environ | {"HEADRACE_DATA": "old:one"})
        assert leaked.stdout == "\n"

    def test_pythonpath_is_kept_behind_the_agents(self, work, environ):
        """The agent's directory comes first on PYTHONPATH, the caller's own entries after it; none means none."""
        starter = script(work, f"import sys; sys.path[0] = {str(SRC)!r}; from headrace.cli import main; main()")
        for own, expected in (("/x:/y", ["/x", "/y"]), ("", [])):
            environ["PYTHONPATH"] = own
            done = finished([sys.executable, starter, "run", "--quiet", "sh", "-c", 'echo "$PYTHONPATH"'], environ)
            first, *rest = done.stdout.strip().split(":")
            assert first.endswith("observe/agent")
            assert rest == expected

    def test_program_that_ends_at_once_is_reported_too(self, work, environ):
        """A program that ends before it is watched leaves a whole record; no sampler was needed."""
        code = f"import sys; sys.path.insert(0, {str(SRC)!r}); from headrace.cli import main; main()"
        starter = script(work, code)
        command = [sys.executable, starter, "run", "--json", "a.json", "--quiet", "sh", "-c", "exit 3"]
        done = finished(command, environ)
        assert (done.returncode, done.stderr) == (3, "")
        assert json.loads((work / "a.json").read_text())["exit_code"] == 3
        assert run_dirs(environ) == []
