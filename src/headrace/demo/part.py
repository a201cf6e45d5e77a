"""One part of the demo: the training script under ``headrace run``, as a child process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.errors import HeadraceError
from headrace.records.run import Run

_STEP_LINE = re.compile(r"step (\d+)/\d+ ")
_DEVICE_LINE = re.compile(r"device: (.+)")
_LAST_LINE = re.compile(r"trained (\d+) steps in ([\d.]+) s")


class PartError(HeadraceError):
    """The training script or headrace ended with an error; the message carries the end of what they wrote."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one part measured.

    Attributes:
        run: headrace's record.
        steps_per_s: By the script's own clock, which knows nothing of headrace.
        device: As the script printed it.
        html: The report.
    """

    run: Run
    steps_per_s: float
    device: str
    html: Path


def play(name: str, script: Path, options: Sequence[str], out_dir: Path, on_step: Callable[[int], None]) -> Part:
    """Runs the script under ``headrace run`` and waits for it.

    Args:
        name: ``before`` or ``after``: the files' stem.
        script: The training script.
        options: Its command line.
        out_dir: Where ``<name>.json``, ``<name>.html`` and ``<name>.log`` go.
        on_step: Called in this thread with the number of steps done.

    Raises:
        PartError: The child ended with an error or left no record.
    """
    json_path, html_path, log_path = (out_dir / f"{name}.{ending}" for ending in ("json", "html", "log"))
    command = [sys.executable, "-m", "headrace", "run", "--quiet", "--json", str(json_path), "--html", str(html_path)]
    with log_path.open("w", encoding="utf-8") as log:
        said, exit_code = _listen([*command, str(script), *options], log.fileno(), on_step)
    last = _LAST_LINE.search(said)
    if exit_code != 0 or last is None:
        raise PartError(f"the {name} part ended with exit code {exit_code}:\n{_tail(log_path, said)}")
    device = _DEVICE_LINE.search(said)
    return Part(
        run=msgspec.json.decode(json_path.read_bytes(), type=Run),
        steps_per_s=int(last[1]) / float(last[2]),
        device=device[1] if device else "unknown",
        html=html_path,
    )


def _listen(command: list[str], log_fd: int, on_step: Callable[[int], None]) -> tuple[str, int]:
    """Follows the child's output line by line; blocks until the child ends. Its errors go to ``log_fd``."""
    said: list[str] = []
    # `headrace run x.py` takes the python of PATH, which is another one where no environment was activated.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    environ = {**os.environ, "PATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log_fd, text=True, env=environ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                said.append(line)
                if step := _STEP_LINE.match(line):
                    on_step(int(step[1]))
        except BaseException:
            # Also on Ctrl-C: the terminal's signal reached the child too, but it may have been sent to us alone.
            child.terminate()
            raise
    return "".join(said), child.returncode


def _tail(log_path: Path, said: str) -> str:
    """The last lines that the child wrote, errors first of all."""
    text = log_path.read_text(encoding="utf-8", errors="replace").strip() or said.strip()
    return "\n".join(text.splitlines()[-15:])
