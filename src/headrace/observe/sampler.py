"""The sampler: looks at the program's process tree from outside, and leaves what it saw in ``host.jsonl``.

    headrace (or a helper beside a notebook)             the program
    +------------------------------------------+         +------------------------+
    | main thread: start() ... stop()          |         | trainer, workers, ...  |
    | sampler thread: Collector -> host.jsonl  | --read->| (not touched)          |
    +------------------------------------------+  /proc  +------------------------+

Only the sampler thread writes ``host.jsonl``, one line per write, so a reader sees at most one torn line, at the end.
It waits on one event with a limit; nothing waits on it but ``stop()``, which has a limit as well.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from pathlib import Path

import msgspec

from headrace.host import cpus, psi
from headrace.host.cgroup import Cgroups, Limits
from headrace.host.clock import Clock, RealClock
from headrace.host.machine import read_machine
from headrace.host.nvml import Gpus, Nvml
from headrace.host.procreader import Files, ProcReader
from headrace.records.rundir import CONTROL_STOP, CgroupSample, HostSample, Machine

HOST_FILE = "host.jsonl"
_MEMORY_PERIOD_NS = 2_000_000_000
#: smaps_rollup holds the process's memory map while it walks: a slow one is asked less often (5 ms -> every 5 s).
_MEMORY_COST_FRAC = 0.001
#: A memory limit that is hit shows within a second or two, or not at all.
_LIMIT_PERIOD_NS = 500_000_000
#: NVML costs tens of microseconds to milliseconds per GPU, depending on board and driver.
_GPU_COST_FRAC = 0.003
#: The sampler's own CPU, as a share of a core: where a look costs more than 2.5 ms, looks become rarer.
_OWN_COST_FRAC = 0.01
#: The file grows by about 10 KB/s at first. After each such share the period doubles: 80 MiB in a week.
_BYTES_PER_DOUBLING = 8 << 20
_MAX_PERIOD_S = 60.0
_JOIN_S = 0.5
#: Looks from one comparison of the limits to the next.
_LOOKS_PER_LIMITS = 4


class Budget:
    """Says when something costly may be done again, so that it takes at most a share of the time.

    Args:
        min_period_ns: The shortest time from one start to the next.
        cost_frac: The share of the time that it may take, 0..1.
    """

    def __init__(self, min_period_ns: int, cost_frac: float) -> None:
        self._min_period_ns, self._cost_frac = min_period_ns, cost_frac
        self._next_ns: int | None = None

    def due(self, now_ns: int) -> bool:
        """Whether it may be done now; the first time it always may."""
        return self._next_ns is None or now_ns >= self._next_ns

    def spent(self, now_ns: int, cost_ns: int) -> None:
        """Tell what it cost when it was done at ``now_ns``."""
        self._next_ns = now_ns + max(self._min_period_ns, int(cost_ns / self._cost_frac))


class Collector:
    """Takes one look at a time. Not a thread: whoever owns it calls it. Blocks only as long as the kernel does.

    Args:
        root_pid: The program's first process.
        clock: Where ``t_ns`` comes from.
        gpus: NVML or a fake; loaded on the first need when None, because loading the driver can take a second.
    """

    def __init__(self, root_pid: int, clock: Clock | None = None, gpus: Gpus | None = None) -> None:
        self._root_pid = root_pid
        self._clock: Clock = clock if clock is not None else RealClock()
        self._gpus = gpus
        self._procs = ProcReader(root_pid)
        self._files = Files()
        self._cgroups = Cgroups(root_pid, self._files.read)
        self._limits = self._cgroups.limits()
        self._allowed = cpus.read_affinity(root_pid)
        self._memory = Budget(_MEMORY_PERIOD_NS, _MEMORY_COST_FRAC)
        self._limit = Budget(_LIMIT_PERIOD_NS, _MEMORY_COST_FRAC)
        self._gpu = Budget(0, _GPU_COST_FRAC)

    def machine(self) -> Machine:
        """The machine as the program may use it; loads NVML."""
        if self._gpus is None:
            self._gpus = Nvml()
        return read_machine(self._root_pid, self._gpus)

    def changed_machine(self, sample: HostSample) -> Machine | None:
        """The machine again, when the program came under other limits (entered a cgroup, set its affinity); else None.

        Asked of the process that used most CPU: a launcher or a shell may stand outside of what limits the training.
        """
        busiest = max(sample.procs, key=lambda proc: proc.user_ns + proc.system_ns, default=None)
        if busiest is None or self._gpus is None:
            return None
        limits = Cgroups(busiest.pid, self._files.read).limits()
        if not _tighter(limits, self._limits):
            return None
        self._limits = limits
        self._cgroups = Cgroups(busiest.pid, self._files.read)
        return read_machine(busiest.pid, self._gpus)

    def sample(self, thorough: bool = False) -> HostSample:
        """The machine and all processes of the program now. No processes: the program is gone.

        Args:
            thorough: Read also what is otherwise read every few looks or seconds only (``status``, memory).
        """
        now = self._clock.monotonic_ns()
        memory = thorough or self._memory.due(now)
        procs = self._procs.read(memory, thorough)
        if memory:
            self._memory.spent(now, self._clock.monotonic_ns() - now)
        sample = HostSample(t_ns=now, procs=procs, cgroup=self._read_cgroup(thorough))
        self._read_cpus(sample)
        read = self._files.read
        sample.psi_cpu_ns, sample.psi_io_ns, sample.psi_memory_ns = (
            psi.read_pressure(resource, read) for resource in ("cpu", "io", "memory")
        )
        self._read_gpus(sample, thorough)
        return sample

    def _read_cgroup(self, thorough: bool) -> CgroupSample | None:
        now = self._clock.monotonic_ns()
        memory = thorough or self._limit.due(now)
        sample = self._cgroups.sample(memory)
        if memory:
            self._limit.spent(now, self._clock.monotonic_ns() - now)
        return sample

    def _read_cpus(self, sample: HostSample) -> None:
        self._allowed = cpus.read_affinity(self._root_pid) or self._allowed
        times = cpus.read_cpu_times(self._files.read)
        mine = cpus.total(times, self._allowed or set())
        if mine is not None:
            sample.cpu_busy_ns, sample.cpu_idle_ns = mine.busy_ns, mine.idle_ns
        everyone = cpus.total(times, set(times))
        sample.machine_busy_ns = everyone.busy_ns if everyone else None

    def _read_gpus(self, sample: HostSample, thorough: bool) -> None:
        start = self._clock.monotonic_ns()
        if self._gpus is None or not (thorough or self._gpu.due(start)):
            return
        sample.gpus = self._gpus.sample()
        self._gpu.spent(start, self._clock.monotonic_ns() - start)

    def close(self) -> None:
        """Let go of the driver and of open files; may be called twice."""
        self._procs.close()
        self._files.close()
        if self._gpus is not None:
            self._gpus.close()


class Sampler:
    """Samples a program into its run directory until it is stopped. Never raises: what fails is kept in ``failure``.

    Args:
        root_pid: The program's first process.
        rundir: The run directory; ``host.jsonl`` in it is written by nobody else.
        period_s: Time between samples, seconds; it doubles after each 8 MiB, up to a minute, and it becomes longer
            where looking would take more than a hundredth of a core.
        clock: Where ``t_ns`` comes from.
        gpus: NVML or a fake.
    """

    def __init__(
        self,
        root_pid: int,
        rundir: Path,
        period_s: float = 0.25,
        clock: Clock | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        self._root_pid, self._period_s = root_pid, period_s
        self._path = Path(rundir) / HOST_FILE
        self._clock, self._gpus = clock, gpus
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-sampler", daemon=True)
        self._written_bytes = 0
        self._cpu_ns = 0
        self._look_ns = 0
        self._num_looks = 0
        #: Why sampling ended early, in words; None while all is well.
        self.failure: str | None = None

    @property
    def cpu_ns(self) -> int:
        """CPU time that the sampler's own thread has used, as of its last sample."""
        return self._cpu_ns

    def start(self) -> None:
        """Begin: the machine, a sample at once, then one each period. Returns immediately; call it once."""
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads on this machine
            self.failure = str(error)

    def stop(self) -> None:
        """Take a last sample and end within half a second; may be called twice, and without `start`."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            collector = Collector(self._root_pid, self._clock, self._gpus)
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                self._loop(collector, fd)
            finally:
                os.close(fd)
                collector.close()
        except Exception as error:  # noqa: BLE001 - boundary of the thread: the program and its run go on without us
            self.failure = f"{type(error).__name__}: {error}"

    def _loop(self, collector: Collector, fd: int) -> None:
        # Looked at before NVML is loaded, so that a program of some milliseconds is seen at all; written after it.
        first = collector.sample()
        self._write(fd, collector.machine())
        self._write(fd, first)
        while not self._stop.wait(self._wait_s()):
            if self._stepped_aside():  # --steps: nothing of ours goes on
                return
            self._look(fd, collector)
        self._look(fd, collector, thorough=True)

    def _stepped_aside(self) -> bool:
        try:
            with self._path.with_name("control").open("rb") as control:
                return any(control.read(8 * (CONTROL_STOP + 1))[8 * CONTROL_STOP :])
        except OSError:
            return False

    def _look(self, fd: int, collector: Collector, thorough: bool = False) -> None:
        before = time.thread_time_ns()
        sample = collector.sample(thorough)
        self._num_looks += 1
        if self._num_looks % _LOOKS_PER_LIMITS == 2:
            machine = collector.changed_machine(sample)
            if machine is not None:
                self._write(fd, machine)
        self._write(fd, sample)
        # Smoothed over about four looks, because every fourth one looks for new processes.
        self._look_ns += ((time.thread_time_ns() - before) - self._look_ns) // 4

    def _wait_s(self) -> float:
        doublings = min(self._written_bytes // _BYTES_PER_DOUBLING, 32)
        for_size = max(self._period_s, min(self._period_s * 2.0**doublings, _MAX_PERIOD_S))
        return max(for_size, self._look_ns / 1e9 / _OWN_COST_FRAC)

    def _write(self, fd: int, line: Machine | HostSample) -> None:
        self._written_bytes += os.write(fd, msgspec.json.encode(line) + b"\n")
        self._cpu_ns = time.thread_time_ns()


def _tighter(new: Limits, old: Limits) -> bool:
    """Only tighter limits count: near the end the busiest process may be one that was never limited."""
    pairs = ((new.cpu_quota_cores, old.cpu_quota_cores), (new.memory_bytes, old.memory_bytes))
    return any(now is not None and (before is None or now < before) for now, before in pairs)


def _wait_for_end(pid: int) -> None:
    """Block until standard input is closed or the process has ended, whichever comes first.

    Both, because forked workers inherit the other end of our standard input and keep it open after their trainer died.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # gone already, or a kernel before 5.3
        pidfd = -1
    else:
        poll.register(pidfd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if pidfd in ready or not os.read(sys.stdin.fileno(), 4096):
            break
    if pidfd >= 0:
        os.close(pidfd)


def main(argv: list[str]) -> int:
    """``python -m headrace.observe.sampler RUNDIR PID``: sample until standard input is closed or PID has ended."""
    if len(argv) != 2 or not argv[1].isdigit():
        print("usage: python -m headrace.observe.sampler RUNDIR PID", file=sys.stderr)
        return 2
    sampler = Sampler(int(argv[1]), Path(argv[0]))
    sampler.start()
    _wait_for_end(int(argv[1]))
    sampler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
