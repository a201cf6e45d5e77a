"""Runs small programs bare, under ``headrace run``, and with the agent alone; reads what the agent wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from headrace.core.events import Trace
from headrace.core.timeline import LoaderView, loader_views
from headrace.records.rundir import EventKind as Kind  # noqa: F401 - for the tests
from headrace.run.gather import read_traces
from tests.process.launching import SRC, environment

HERE = Path(__file__).parent
#: The directory that goes onto PYTHONPATH.
AGENT = next(p for p in (SRC / "headrace" / name / "agent" for name in ("observer", "observe")) if p.exists())
TIMEOUT_S = 120


class Done(NamedTuple):
    """What one run of a program left."""

    code: int
    out: str
    err: str
    run_dir: Path | None = None

    @property
    def lines(self) -> list[dict]:
        """The JSON lines the program printed."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    @property
    def traces(self) -> list[Trace]:
        assert self.run_dir is not None
        return read_traces(self.run_dir)

    @property
    def trainer(self) -> Trace:
        """The one process that was started, not forked, and iterated something."""
        (found,) = [trace for trace in self.traces if trace.is_trainer and not trace.start["forked"]]
        return found

    @property
    def views(self) -> dict[str, LoaderView]:
        """The trainer's loaders by ``file:line`` of their site."""
        return {view.site.rsplit("/", 1)[-1]: view for view in loader_views(self.trainer)}

    @property
    def errors(self) -> list[str]:
        """What the agent says went wrong in it."""
        return [f"{line['where']}: {line['text']}" for trace in self.traces for line in trace.lines("error")]


def new_run_dir(tmp_path: Path, *, steps: int = 0) -> Path:
    """A run directory as ``headrace run`` makes it."""
    from headrace.run.rundirs import make_run_dir, write_control

    run_dir = make_run_dir(Path(tempfile.mkdtemp(dir=tmp_path, prefix="runs-")))
    write_control(run_dir, steps or None, 0)
    header = {"command": ["x"], "headrace_version": "0", "headrace_pid": os.getpid(), "started_mono_ns": 0}
    header |= {"started_unix_ns": time.time_ns(), "started_mono_ns": time.monotonic_ns()}
    (run_dir / "run.json").write_text(json.dumps(header))
    return run_dir


def agent_environ(environ: dict[str, str], run_dir: Path) -> dict[str, str]:
    """What ``headrace run`` adds to the program's environment."""
    paths = [str(AGENT), *filter(None, [environ.get("PYTHONPATH")])]
    return environ | {"PYTHONPATH": os.pathsep.join(paths), "HEADRACE_RUN_DIR": str(run_dir)}


def plain_environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """The environment of a user: nothing of headrace in it."""
    environ = environment(tmp_path, **more)
    return environ if "PYTHONPATH" in more else {k: v for k, v in environ.items() if k != "PYTHONPATH"}


def run(command, environ, run_dir=None, cwd=HERE, **options) -> Done:
    done = subprocess.run(
        list(map(str, command)), env=environ, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, **options
    )
    return Done(done.returncode, done.stdout, done.stderr, run_dir)


def bare(tmp_path: Path, program: str, *words: str, **more: str) -> Done:
    """One of the programs beside this file, as its user starts it."""
    return run([sys.executable, HERE / program, *words], plain_environ(tmp_path, **more))


def with_agent(tmp_path: Path, program: str, *words: str, steps: int = 0, **more: str) -> Done:
    """The same with the agent in it, without headrace around it."""
    run_dir = new_run_dir(tmp_path, steps=steps)
    environ = agent_environ(plain_environ(tmp_path, **more), run_dir)
    return run([sys.executable, HERE / program, *words], environ, run_dir)


def under_headrace(tmp_path: Path, program: str, *words: str, options=(), **more: str) -> Done:
    """The same under ``headrace run``; the run directory is kept."""
    environ = plain_environ(tmp_path, HEADRACE_KEEP="1", **more)
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from headrace.cli import main; main()"
    command = [sys.executable, "-c", start, SRC, "run", "--quiet", *options, HERE / program, *words]
    done = run(command, environ)
    run_dir = max((tmp_path / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return done._replace(run_dir=run_dir)
