"""Python processes that never reported, and programs without a loader: what /proc and stacks can still tell."""

from __future__ import annotations

from ..core import analyse as core
from ..core import loaderless
from ..records.run import Process, Run

_PYTHON = ("python", "pt_main_thread")
_SILENT = (
    "never reported: started with -I, -S or without the environment (env -i, sudo), "
    "or forked by a process without torch"
)


def add_silent_processes(run: Run, observed: core.Observed) -> None:
    """Names Python processes that left no trace, and looks for loops without any DataLoader."""
    loaderless.add(run, observed)
    known = {trace.pid for trace in observed.traces}
    looks: dict[int, int] = {}
    seen: dict[int, str] = {}
    for sample in observed.samples:
        for proc in sample.procs:
            if proc.comm.startswith(_PYTHON) and proc.pid not in known:
                looks[proc.pid] = looks.get(proc.pid, 0) + 1
                # One look may catch a child of a Python process between fork and exec, still under its parent's name.
                if looks[proc.pid] > 1:
                    seen[proc.pid] = proc.comm
    for pid, comm in seen.items():
        run.processes.append(Process(pid=pid, argv=[comm], note=_SILENT))
    if not run.processes:
        told = (
            "torch was never imported"
            if not any(t.lines("torch") for t in observed.traces)
            else "no batch was asked for"
        )
        if not observed.traces:
            told = "no Python process reported and none was seen from /proc"
        run.notes.append(told)
    _judge_silent(run, observed, list(seen))


def _judge_silent(run: Run, observed: core.Observed, pids: list[int]) -> None:
    from ..core import procview

    if run.finding is not None or not pids or observed.machine is None:
        return
    busiest = max(pids, key=lambda pid: _cpu_ns(observed, pid))
    loader = procview.view(observed.samples, observed.machine, busiest)
    process = next(p for p in run.processes if p.pid == busiest)
    process.loaders.append(loader)
    run.finding = loader.finding


def _cpu_ns(observed: core.Observed, pid: int) -> int:
    return max((p.user_ns + p.system_ns for s in observed.samples for p in s.procs if p.pid == pid), default=0)
