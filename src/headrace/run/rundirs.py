"""Makes run directories. The layout of what is in them is ``records/rundir.py``."""

from __future__ import annotations

import os
import pwd
import time
from array import array
from pathlib import Path

CONTROL_BYTES = 4096


def make_run_dir(root: Path | None) -> Path:
    """Makes ``headrace-<user>-<time>-<pid>``, readable by its owner alone.

    Args:
        root: Where to make it; made itself if it is missing. None: the first usable one of TMPDIR, /tmp and /var/tmp.

    Raises:
        OSError: no place can be written to.
    """
    # The clock's last digits: a notebook's cell may observe twice within a second.
    name = f"headrace-{_user()}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
        return _make(root / name)
    for place in filter(None, (os.environ.get("TMPDIR"), "/tmp")):
        try:
            return _make(Path(place) / name)
        except OSError:
            continue
    return _make(Path("/var/tmp") / name)


def write_control(run_dir: Path, steps: int | None, warmup: int) -> None:
    """Writes the cells through which the agents talk; 0 means "not set" in each of them."""
    cells = array("Q", bytes(CONTROL_BYTES))
    if steps or warmup:
        # Only then: importing the numbers means importing msgspec, 20 ms before the program starts.
        from headrace.records import rundir

        cells[rundir.CONTROL_MAX_STEPS] = steps or 0
        cells[rundir.CONTROL_WARMUP_STEPS] = warmup
    (run_dir / "control").write_bytes(cells.tobytes())


def _make(path: Path) -> Path:
    path = path.absolute()
    os.mkdir(path, 0o700)
    return path


def _user() -> str:
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
        return "".join(c if c.isalnum() or c in "._" else "-" for c in name)  # domain accounts hold backslashes
    except KeyError:  # containers often run under a number that has no name
        return str(os.getuid())
