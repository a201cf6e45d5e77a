"""Reads a run directory and makes the record of the run. Works on the directory of a run that was killed, too."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..core import analyse as core
from ..core import events
from ..records.run import Process, Run
from ..records.rundir import CONTROL_STOP, HostSample, Machine, RunEnd, RunHeader
from . import fallback
from .redact import redact

_MAX_FILE_BYTES = 64 << 20


def gather(rundir: Path) -> Run:
    """The record of the run whose files lie in ``rundir``. Blocks for the analysis, about 10 us an event.

    Raises:
        RecordError: ``rundir`` is not a run directory.
    """
    with _no_collector():
        return _gather(rundir)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    # All of the decoded events stay alive to the end: walking them again and again was 40 % of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _gather(rundir: Path) -> Run:
    header = _read_header(rundir)
    end = _read_end(rundir)
    samples, machine = _read_host(rundir / "host.jsonl")
    observed = core.Observed(
        traces=read_traces(rundir),
        samples=samples,
        machine=machine,
        zero_ns=header.started_mono_ns,
        warmup=header.warmup,
    )
    processes, finding = core.analyse(observed)
    run = Run(
        headrace=__version__,
        command=redact(header.command),
        started_unix_ns=header.started_unix_ns,
        ended="lost",
        finding=finding,
        processes=processes,
        fingerprint=_fingerprint(machine, observed),
    )
    _add_end(run, end, header, _stepped_aside(rundir))
    run.overhead = core.overhead(observed, end.sampler_cpu_ns if end else None, run.duration_ns)
    fallback.add_silent_processes(run, observed)
    _add_unavailable(run, machine)
    return run


def _read_header(rundir: Path) -> RunHeader:
    from ..errors import RecordError

    try:
        return msgspec.json.decode((rundir / "run.json").read_bytes(), type=RunHeader)
    except (OSError, msgspec.MsgspecError) as error:
        raise RecordError(f"{rundir} is not a run directory of headrace: run.json: {error}") from error


def _read_end(rundir: Path) -> RunEnd | None:
    try:
        return msgspec.json.decode((rundir / "end.json").read_bytes(), type=RunEnd)
    except (OSError, msgspec.MsgspecError):
        return None  # headrace itself was killed: the run is reported as lost


def _read_host(path: Path) -> tuple[list[HostSample], Machine | None]:
    samples: list[HostSample] = []
    machine: Machine | None = None
    decoder = msgspec.json.Decoder(HostSample | Machine)
    for line in _lines(path):
        try:
            item = decoder.decode(line)
        except msgspec.MsgspecError:
            continue  # the last line of a sampler that was killed
        if isinstance(item, Machine):
            if machine is not None:  # it moved into a tighter cgroup: the counters of the former one do not go on
                for sample in samples:
                    sample.cgroup = None
            machine = item
        else:
            samples.append(item)
    return samples, machine


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []


def read_traces(rundir: Path) -> list[events.Trace]:
    """One trace per interpreter or fork that left a ``.meta`` file."""
    traces = []
    for path in sorted(rundir.glob("*.meta")):
        meta = _meta(path)
        start = next((line for line in meta if line.get("k") == "start" and "pid" in line), None) or _start_of(path)
        if start is not None:
            traces.append(events.Trace(start, meta, _events(path.with_suffix(".ev"))))
    return traces


def _start_of(path: Path) -> dict[str, Any] | None:
    """What the file's name says, where the first line is missing: forked before torch, killed, or a full disk."""
    pid, _, start_ns = path.stem.partition("-")
    return {"k": "start", "pid": int(pid), "t_ns": int(start_ns)} if pid.isdigit() and start_ns.isdigit() else None


def _meta(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in _lines(path):
        try:
            item = json.loads(line)
        except ValueError:
            continue  # cut off by the end of its process
        if isinstance(item, dict):
            lines.append(item)
    return lines


def _events(path: Path) -> events.EventFile | None:
    try:
        with path.open("rb") as file:
            head = file.read(4096)
            written = int.from_bytes(head[8:16], "little")
            return events.decode(head + file.read(min(written * 64, _MAX_FILE_BYTES)))
    except OSError:
        return None


def _add_end(run: Run, end: RunEnd | None, header: RunHeader, stepped_aside: bool) -> None:
    if end is None:
        run.unavailable["/exit_code"] = "headrace ended before the program did"
        return
    run.ended = end.ended if end.ended in ("exit", "signal", "steps") else "lost"  # type: ignore[assignment]
    if stepped_aside and run.ended == "exit":
        run.ended = "steps"
    run.exit_code, run.signal = end.exit_code, end.signal
    if end.ended == "steps":
        run.unavailable["/exit_code"] = "the program went on after it was observed"
    run.duration_ns = end.ended_mono_ns - header.started_mono_ns


def _stepped_aside(rundir: Path) -> bool:
    """Whether the agents saw as many steps as ``--steps`` asked for and unhooked themselves."""
    try:
        return any((rundir / "control").read_bytes()[8 * CONTROL_STOP : 8 * (CONTROL_STOP + 1)])
    except OSError:
        return False


def _fingerprint(machine: Machine | None, observed: core.Observed) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if machine is not None:
        facts.update(msgspec.to_builtins(machine))
        facts.pop("unavailable", None)
        facts.pop("type", None)
    for trace in observed.traces:
        if trace.is_trainer:
            facts.setdefault("python", trace.start.get("python"))
            for line in trace.lines("torch"):
                facts.setdefault("torch", line.get("version"))
                facts.setdefault("torch_cuda", line.get("cuda"))
    return facts


def _add_unavailable(run: Run, machine: Machine | None) -> None:
    if machine is not None:
        for name, reason in machine.unavailable.items():
            run.unavailable[f"/fingerprint/{name}"] = reason
    else:
        run.unavailable["/fingerprint"] = "the sampler did not run"
    if run.finding is None:
        run.unavailable["/finding"] = "no training step was seen"
    for i, process in enumerate(run.processes):
        _loader_gaps(run, i, process)


def _loader_gaps(run: Run, i: int, process: Process) -> None:
    for j, loader in enumerate(process.loaders):
        at = f"/processes/{i}/loaders/{j}"
        if loader.wait_frac is None:
            run.unavailable[f"{at}/wait_frac"] = "nothing was waited for"
        if loader.samples_per_s is None:
            run.unavailable[f"{at}/samples_per_s"] = "the batch size is not known"
        if loader.step_ns is None:
            run.unavailable[f"{at}/step_ns"] = "no step was seen"
        if loader.steady_stall_frac is None:
            run.unavailable[f"{at}/steady_stall_frac"] = "no steady step was seen"
