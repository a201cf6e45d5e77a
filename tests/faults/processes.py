"""Runs one script in a process group of its own, inside its cgroup where it has one, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog import SCRIPTS, Fault

sys.path.insert(0, str(SCRIPTS))
import cgroups
import pressure

IN_CGROUP = "HEADRACE_FAULTS_IN_CGROUP"
SOURCE = Path(__file__).parents[2] / "src"


class Skipped(Exception):
    """This fault cannot be planted on this machine; the message is the reason."""


class Broken(Exception):
    """The command failed or ran too long."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How every command is run."""

    timeout_s: float = 120.0
    niceness: int = 0


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command left: its JSON, and how many cores other programs took meanwhile."""

    record: dict[str, Any]
    outside_cores: float


def bare(fault: Fault, arguments: list[str], settings: Settings) -> Ran:
    """The script alone; its numbers by ``--result``."""
    fixed = "--fixed" in arguments or "limited=0" in arguments
    with _scratch() as result:
        command = [*_launcher(fault), str(fault.path), "--result", str(result), *arguments]
        return _run(fault, command, result, settings, limited=not fixed)


def watched(fault: Fault, arguments: list[str], settings: Settings) -> Ran:
    """The script under ``headrace run``; the record by ``--json``."""
    with _scratch() as result:
        command = [sys.executable, "-m", "headrace", "run", "--quiet", "--json", str(result)]
        program = [*_launcher(fault), str(fault.path)]
        if program[0] == sys.executable and len(program) == 2:
            program = program[1:]
        return _run(fault, [*command, *program, *arguments], result, settings, limited=True)


def _launcher(fault: Fault) -> list[str]:
    if fault.header.get("launcher") != "torchrun":
        return [sys.executable]
    return [
        "torchrun",
        "--nproc-per-node",
        str(fault.header["ranks"]),
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]


def _run(fault: Fault, command: list[str], result: Path, settings: Settings, *, limited: bool) -> Ran:
    _check_machine(fault)
    with _cgroup(fault, limited) as group, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment(fault),
            start_new_session=True, preexec_fn=lambda: _before_exec(group, settings),
        )  # fmt: skip
        outside = pressure.Outside(process.pid)
        try:
            usage = _wait(process, settings.timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        cores = outside.cores(round((usage.ru_utime + usage.ru_stime) * 1e9))
        if process.returncode or not result.exists() or not result.stat().st_size:
            output.seek(0)
            text = output.read().decode(errors="replace")[-1500:]
            raise Broken(f"exit code {process.returncode}: {' '.join(command)}\n{text}")
    return Ran(record=json.loads(result.read_text()), outside_cores=cores)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> Any:
    """Wait with a limit and get the CPU time of the whole tree; on time-out the group is killed."""
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage


def _check_machine(fault: Fault) -> None:
    needed = fault.header.get("needs_shm_bytes", 0)
    if needed and shutil.disk_usage("/dev/shm").total < needed:
        raise Skipped(f"/dev/shm is smaller than {needed} bytes")


@contextlib.contextmanager
def _cgroup(fault: Fault, limited: bool) -> Iterator[cgroups.Group | None]:
    if "cgroup" not in fault.header or not limited:
        yield None
        return
    try:
        group = cgroups.create(cgroups.Limits(**fault.header["cgroup"]))
    except cgroups.Unpermitted as reason:
        raise Skipped(str(reason)) from reason
    try:
        yield group
    finally:
        group.remove()


def _before_exec(group: cgroups.Group | None, settings: Settings) -> None:
    """In the child: into the cgroup, and ahead of other programs where the caller asked for it.

    A new session is a new autogroup, and then the autogroup's niceness counts, not the process's.
    """
    if group is not None:
        group.enter()
    if settings.niceness:
        os.setpriority(os.PRIO_PROCESS, 0, settings.niceness)
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(settings.niceness))


def _environment(fault: Fault) -> dict[str, str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    if "cgroup" in fault.header:
        environment[IN_CGROUP] = "1"
    if importlib.util.find_spec("headrace") is None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), environment.get("PYTHONPATH")]))
    return environment


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headrace-faults-") as directory:
        yield Path(directory) / "result.json"
