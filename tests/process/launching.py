"""Runs programs bare and under headrace, as real processes.

Started as a script, this file is headrace's command line with stand-ins for the layers that the launcher calls
(sampler, gather, report), so that the tests see the launcher alone. ``STUB_FAIL`` names the stand-ins that raise.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
TIMEOUT_S = 30
#: For ``sh -c``: runs on until headrace watches it.
UNTIL_WATCHED = 'until [ -e "$HEADRACE_RUN_DIR/run.json" ]; do :; done; '


def environment(tmp_path, **more):
    """The tests' own environment, with run directories under ``tmp_path`` and this interpreter first on PATH."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    path = os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", "")])
    return environ | {"HEADRACE_RUN_ROOT": str(tmp_path / "runs"), "PYTHONPATH": str(SRC), "PATH": path} | more


def headrace(*words):
    """The command line of headrace."""
    return [sys.executable, __file__, *map(str, words)]


def finished(command, environ, **options):
    """Runs to the end and returns what it wrote, as text."""
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options
    )


@contextlib.contextmanager
def running(command, environ, **options):
    """A process with pipes; killed and reaped at the end of the block, come what may."""
    pipe = subprocess.PIPE
    options = {"stdin": pipe, "stdout": pipe, "stderr": pipe} | options
    with subprocess.Popen(command, env=environ, text=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run_dirs(environ):
    """Run directories that are left."""
    root = Path(environ["HEADRACE_RUN_ROOT"])
    return sorted(root.iterdir()) if root.is_dir() else []


def _main():
    from headrace.cli import main
    from headrace.records.run import Run
    from headrace.run import launch, session

    failing = os.environ.get("STUB_FAIL", "").split(",")

    def maybe_fail(name):
        if name in failing:
            raise RuntimeError(f"{name} is\nbroken")

    class Sampler:
        failure = "no more /proc" if "sampling" in failing else None
        cpu_ns = 7

        def __init__(self, pid, run_dir):
            maybe_fail("sampler")
            self.path = run_dir / "host.jsonl"

        def start(self):
            self.path.write_text("started\n")

        def stop(self):
            with self.path.open("a") as file:
                file.write("stopped\n")

    class Parts:
        sampler = Sampler

        def gather(self, run_dir):
            maybe_fail("gather")
            header, end = (json.loads((run_dir / name).read_text()) for name in ("run.json", "end.json"))
            sampled = (run_dir / "host.jsonl").read_text().split() if (run_dir / "host.jsonl").exists() else []
            return Run(
                headrace=header["headrace_version"],
                command=header["command"],
                ended=end["ended"],
                exit_code=end["exit_code"],
                signal=end["signal"],
                notes=[f"sampler {sampled}"],
            )

        def render(self, run):
            maybe_fail("render")
            size = int(os.environ.get("STUB_REPORT_BYTES", "0"))
            return f"REPORT ended={run.ended} exit_code={run.exit_code} signal={run.signal}\n" + "x" * size

        def writer(self, kind):
            def write(run, path):
                maybe_fail(kind)
                path.write_text(f"{kind} of {run.command} {run.notes}")

            return write

    session.Parts = Parts
    launch._HEAD_START_S = 0.0
    main()


if __name__ == "__main__":
    _main()
