"""``headrace attach PID``: diagnoses a job that is already running, from ``/proc`` and NVML, without touching it.

No signal, no ptrace, no change to its environment. One thread looks, alternately: every 0.25 s at all counters, and in
between, about 20 times a second, at what the main threads are blocked on.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace import __version__
from headrace.core import procview
from headrace.errors import UsageError
from headrace.host import procfs
from headrace.host.blocked import blocked_on
from headrace.host.clock import Clock, RealClock
from headrace.host.nvml import Gpus
from headrace.observe.sampler import Collector
from headrace.records.run import Loader, Overhead, Process, Run
from headrace.records.rundir import HostSample, Machine
from headrace.run.redact import redact

_SAMPLE_PERIOD_NS = 250_000_000
_LOOK_PERIOD_S = 0.05
#: Looking at one thread costs 30 us to 0.5 ms (cold caches): with many processes the looks become rarer.
_LOOK_COST_FRAC = 0.03
_MAX_LOOKED_AT = 32
_MIN_SECONDS, _MAX_SECONDS = 1.0, 3600.0
_FROM_OUTSIDE = "seen from outside only: needs headrace run"
_UNSEEN = (
    "step_ns",
    "stall_frac",
    "steady_stall_frac",
    "stall_ci",
    "time_frac",
    "wait_frac",
    "service_ns",
    "samples_per_s",
    "ceiling_samples_per_s",
)
_NOTES = (
    "Not known from outside: step time, the stall on the device's clock, batches, copies, lines of the program.",
    "'headrace run COMMAND...' measures them, and what a change would bring.",
    "Waits are sampled up to 20 times a second and counters 4 times a second: shares are good to some percent.",
)


def attach(pid: int, seconds: float = 10.0, *, clock: Clock | None = None, gpus: Gpus | None = None) -> Run:
    """Watch a running job for a while and say what it waits for. Blocks for ``seconds``, less when the job ends.

    Args:
        pid: The job: its trainer, or the launcher or shell that started it.
        seconds: How long to look, 1 to 3600.
        clock: Where times come from.
        gpus: NVML or a fake.

    Raises:
        UsageError: There is no such process, it is a kernel thread or has ended, or it may not be read.
    """
    _check(pid, seconds)
    watch = _Watch(pid, clock or RealClock(), gpus)
    try:
        watch.look_for(seconds)
    finally:
        watch.close()
    return watch.run()


def _check(pid: int, seconds: float) -> None:
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise UsageError(f"seconds must be from {_MIN_SECONDS:g} to {_MAX_SECONDS:g}, not {seconds:g}")
    if pid <= 0 or not os.path.isdir(f"/proc/{pid}"):
        raise UsageError(f"there is no process {pid}")
    if pid == os.getpid():
        raise UsageError(f"process {pid} is headrace itself")
    sample = procfs.read_proc(pid)
    if sample is not None and sample.state in "ZX":
        raise UsageError(f"process {pid} ({sample.comm}) has ended and waits for its parent to notice")
    if sample is None or sample.on_cpu_ns is None:
        raise UsageError(f"process {pid} may not be read; attach as the user that it belongs to")
    if procfs.read_cmdline(pid) == []:
        raise UsageError(f"process {pid} ({sample.comm}) is a thread of the kernel")


class _Watch:
    """What is seen of one job; one thread, used once."""

    def __init__(self, pid: int, clock: Clock, gpus: Gpus | None) -> None:
        self._pid, self._clock = pid, clock
        self._cpu_before_ns = time.thread_time_ns()
        self._started_unix_ns, self._started_ns = clock.unix_ns(), clock.monotonic_ns()
        self._collector = Collector(pid, clock, gpus)
        self._machine: Machine = self._collector.machine()
        self._samples: list[HostSample] = []
        self._looks: dict[int, list[str | None]] = {}
        self._words = procfs.read_cmdline(pid) or []
        self._argv: dict[int, list[str]] = {}
        self._may_look = procfs.read_text(f"/proc/{pid}/task/{pid}/syscall") is not None
        self._wait = _Wait(pid)

    def look_for(self, seconds: float) -> None:
        """Look until the time is over or the job has ended."""
        end = self._clock.monotonic_ns() + int(seconds * 1e9)
        self._sample(thorough=True)
        next_sample = self._samples[-1].t_ns + _SAMPLE_PERIOD_NS
        while (now := self._clock.monotonic_ns()) < end and self._alive():
            if now >= next_sample:
                self._sample()
                next_sample = max(next_sample + _SAMPLE_PERIOD_NS, now)
            rest_s = max(_LOOK_PERIOD_S, self._look() / 1e9 / _LOOK_COST_FRAC)
            if self._wait.ended_within(min(rest_s, (end - now) / 1e9)):
                break
        self._sample(thorough=True)

    def _sample(self, thorough: bool = False) -> None:
        sample = self._collector.sample(thorough)
        self._samples.append(sample)
        for proc in sample.procs:
            if proc.pid not in self._argv:
                self._argv[proc.pid] = redact(procfs.read_cmdline(proc.pid) or [])

    def _look(self) -> int:
        """Look once at the main thread of each process. Returns the CPU time that it took, ns."""
        before = time.thread_time_ns()
        for proc in self._samples[-1].procs[:_MAX_LOOKED_AT]:
            if procfs.read_schedstat(proc.pid, proc.pid) is not None:
                self._looks.setdefault(proc.pid, []).append(blocked_on(proc.pid, proc.pid))
        return time.thread_time_ns() - before

    def close(self) -> None:
        """Let go of files and the driver; may be called twice."""
        self._wait.close()
        self._collector.close()

    def run(self) -> Run:
        """The record."""
        pids = procview.trainers(self._samples, self._pid)
        loaders = [procview.view(self._samples, self._machine, pid, self._seen_looks()) for pid in pids]
        processes = [self._process(pid, loader) for pid, loader in zip(pids, loaders, strict=True)]
        worst = max(loaders, key=_weight)
        duration_ns = self._samples[-1].t_ns - self._started_ns
        return Run(
            headrace=__version__,
            command=redact(self._words),
            started_unix_ns=self._started_unix_ns,
            duration_ns=duration_ns,
            # The job goes on, and it is the watching that ended; or nobody told us how the job did.
            ended="steps" if self._alive() else "lost",
            finding=worst.finding,
            processes=processes,
            fingerprint=_fingerprint(self._machine),
            overhead=self._overhead(duration_ns),
            notes=[*_NOTES, *self._permission_notes()],
            unavailable=_unavailable(len(processes), self._machine),
        )

    def _alive(self) -> bool:
        return any(proc.pid == self._pid and proc.state not in "ZX" for proc in self._samples[-1].procs)

    def _seen_looks(self) -> Mapping[int, Sequence[str | None]] | None:
        """What was seen; None when the kernel does not show it, which would look like a job that always runs."""
        seen = self._may_look or any(text for looks in self._looks.values() for text in looks)
        return self._looks if seen else None

    def _process(self, pid: int, loader: Loader) -> Process:
        environ = procfs.read_environ(pid) or {}
        rank = environ.get("RANK", "")
        return Process(
            pid=pid,
            rank=int(rank) if rank.isdigit() else None,
            argv=self._argv.get(pid, []),
            note="attached: seen from /proc",
            loaders=[loader],
        )

    def _overhead(self, duration_ns: int) -> Overhead:
        spent = time.thread_time_ns() - self._cpu_before_ns
        return Overhead(sampler_cores=spent / max(duration_ns, 1))

    def _permission_notes(self) -> list[str]:
        notes = []
        if self._seen_looks() is None:
            notes.append("What its threads are blocked on may not be read (other user, or Yama's ptrace_scope).")
        if all(proc.read_bytes is None for sample in self._samples for proc in sample.procs):
            notes.append("What it reads and writes may not be read: the job belongs to another user.")
        return notes


class _Wait:
    """Waits for the job to end, with a limit; wakes at once through a pidfd where the kernel has it (5.3)."""

    def __init__(self, pid: int) -> None:
        self._poll = select.poll()
        self._never = threading.Event()
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:
            self._fd = -1
        else:
            self._poll.register(self._fd, select.POLLIN)

    def ended_within(self, seconds: float) -> bool:
        """Whether it ended within the time; False also when that can not be known."""
        if self._fd < 0:
            return self._never.wait(seconds)
        return bool(self._poll.poll(seconds * 1000))

    def close(self) -> None:
        """Close the pidfd; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _weight(loader: Loader) -> tuple[bool, float]:
    """The loader whose finding costs most; one that says nothing comes last."""
    finding = loader.finding
    if finding is None:
        return (False, 0.0)
    return (finding.cause not in ("unknown", "compute"), finding.share_frac or 0.0)


def _fingerprint(machine: Machine) -> dict[str, Any]:
    built = msgspec.to_builtins(machine)
    return {key: value for key, value in built.items() if key not in ("type", "unavailable")}


def _unavailable(num_processes: int, machine: Machine) -> dict[str, str]:
    reasons = {f"/fingerprint/{key}": reason for key, reason in machine.unavailable.items()}
    for index in range(num_processes):
        reasons.update({f"/processes/{index}/loaders/0/{name}": _FROM_OUTSIDE for name in _UNSEEN})
        reasons[f"/processes/{index}/loaders/0/finding/stall_frac"] = _FROM_OUTSIDE
    reasons["/finding/stall_frac"] = _FROM_OUTSIDE
    return reasons
