"""The run directory: what a run leaves on disk while it is going, and how each file is laid out.

One directory per observed run. Every file has exactly one writer, so a writer that is killed takes nothing with it:

    run.json          headrace, before the program starts
    control           4 KiB of shared cells (see ``CONTROL_*``): the agents of one run talk through it
    <tag>.ev          one per interpreter start and per fork: mapped file of 64-byte events (see ``EventKind``)
    <tag>.meta        beside it: JSON lines for what has no fixed size (loaders, sites, stacks)
    host.jsonl        the sampler, outside the program: /proc, cgroup, PSI, NVML
    end.json          headrace, when the program has ended; absent when headrace itself was killed

``<tag>`` is ``<pid>-<start ns>``: a pid alone is not enough, because exec keeps it.

The agent that writes ``.ev`` and ``.meta`` may run where headrace is not installed, so it repeats the numbers
below; ``tests/unit/test_format.py`` holds the two together.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

RUNDIR_FORMAT = "headrace.rundir/1"

EVENT_MAGIC = 0x3145434152444148  # b"HADRACE1" read as a little-endian integer
EVENT_HEADER_BYTES = 4096
EVENT_BYTES = 64
#: The first HEAD_EVENTS stay for ever; later ones share a ring of RING_EVENTS, so that a week-long job keeps its
#: beginning and its most recent past in at most 24 MiB per process.
HEAD_EVENTS = 131_072
RING_EVENTS = 262_144
#: "Not measured" in a field of an event.
NONE = (1 << 64) - 1

# Cells of 8 bytes in the header of a ``.ev`` file.
CELL_MAGIC, CELL_NUM_EVENTS, CELL_PID, CELL_START_NS, CELL_HOOK_NS, CELL_NUM_STEPS = range(6)
# Cells of 8 bytes in ``control``.
CONTROL_STOP, CONTROL_SAMPLE_UNTIL_NS, CONTROL_MAX_STEPS, CONTROL_WARMUP_STEPS = range(4)


class EventKind(enum.IntEnum):
    """Kinds of events. An event is 8 little-endian u64: kind, t0_ns, t1_ns, a, b, c, d, e.

    Times are ``time.monotonic_ns()``, one clock for all processes of a machine. ``w1`` is worker_id + 1, 0 in the
    trainer.
    """

    NEXT = 1  # __next__: a=iter, b=num delivered before in this epoch, c=flags, d=on-CPU ns or NONE, e=batch idx
    EPOCH = 2  # DataLoader.__iter__: a=iter, b=loader, c=1 workers reused, d=its epoch, e=run-queue ns or NONE
    RECV = 3  # trainer got a batch from the result (or pin) queue: a=iter, b=idx, c=resume count
    FETCH = 4  # fetcher.fetch: a=w1, b=idx (NONE in the trainer), c=collate ns, d=on-CPU ns, e=run-queue ns or NONE
    TASK = 5  # worker, t0=got index, t1=batch handed to the queue: a=w1, b=idx, c=resume count, d=bytes, e=num tensors
    SAMPLE = 6  # slowest sample: a=w1, b=idx, c=its index or NONE, d=num samples, e=process CPU ns of the fetch
    PIN = 7  # pin thread, t0=received, t1=handed on: a=queue id, b=idx
    OPTIMIZER = 8  # optimizer.step, from the end of backward (its start is not hooked): a=t0 of that backward or 0
    BACKWARD = 9  # torch.autograd.backward without an optimizer step after it (decoding makes one of every OPTIMIZER.a)
    COPY = 10  # host -> device: a=bytes, b=flags (1 pinned, 2 non_blocking), c=site
    SYNC = 11  # host waited for the device: c=site, d=1 when the device idled after it
    DEVICE = 12  # device clock around __next__: a=iter, b=num delivered, c=idle ns, d=1 had run dry, 0 not, or NONE
    DIST = 13  # a collective call from Python: c=site
    SAVE = 14  # torch.save
    CALL = 15  # --data: one call of the function or item of the iterator: a=iter, d=on-CPU ns
    FORK = 16  # this process forked: a=child pid


#: Flags of NEXT; above them, from bit NEXT_QUEUED_SHIFT, one more than its us in the run queue, or 0: not measured.
NEXT_STOP, NEXT_ERROR, NEXT_QUEUED_SHIFT = 1, 2, 8
COPY_PINNED, COPY_NON_BLOCKING = 1, 2


class RunHeader(msgspec.Struct, kw_only=True):
    """``run.json``."""

    format: str = RUNDIR_FORMAT
    command: list[str]
    headrace_version: str
    headrace_pid: int
    started_mono_ns: int
    started_unix_ns: int
    steps: int | None = None
    warmup: int = 0


class RunEnd(msgspec.Struct, kw_only=True):
    """``end.json``."""

    ended: str
    exit_code: int | None = None
    signal: int | None = None
    ended_mono_ns: int
    sampler_cpu_ns: int | None = None


class ProcSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One process at one moment. Times and counts are totals since its start."""

    pid: int
    ppid: int
    comm: str
    state: str
    num_threads: int
    #: Main thread: ns on a core, ns ready but without a core (``schedstat``).
    on_cpu_ns: int | None = None
    run_queue_ns: int | None = None
    #: The same summed over all its other threads.
    others_on_cpu_ns: int | None = None
    others_run_queue_ns: int | None = None
    user_ns: int = 0
    system_ns: int = 0
    minor_faults: int = 0
    major_faults: int = 0
    read_bytes: int | None = None
    rchar_bytes: int | None = None
    write_bytes: int | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    rss_bytes: int = 0
    num_allowed_cpus: int | None = None
    #: Only every few samples (reading it walks the page tables): private dirty, swapped.
    private_dirty_bytes: int | None = None
    swap_bytes: int | None = None


class CgroupSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tightest enclosing cgroup at one moment; totals since its creation."""

    usage_ns: int | None = None
    num_throttled: int | None = None
    throttled_ns: int | None = None
    memory_bytes: int | None = None
    memory_file_bytes: int | None = None
    memory_limit_hits: int | None = None


class GpuSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One GPU at one moment, from NVML."""

    index: int
    util_frac: float | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttle_reasons: int | None = None
    throttled_power_ns: int | None = None
    throttled_thermal_ns: int | None = None


class HostSample(msgspec.Struct, kw_only=True, omit_defaults=True, tag="sample"):
    """A line of ``host.jsonl``: the machine and the program's process tree at ``t_ns`` (monotonic)."""

    t_ns: int
    procs: list[ProcSample]
    #: Over the CPUs that the program's root process may use.
    cpu_busy_ns: int | None = None
    cpu_idle_ns: int | None = None
    #: Busy time of all CPUs of the machine.
    machine_busy_ns: int | None = None
    psi_cpu_ns: int | None = None
    psi_io_ns: int | None = None
    psi_memory_ns: int | None = None
    cgroup: CgroupSample | None = None
    gpus: list[GpuSample] = []


class Machine(msgspec.Struct, kw_only=True, omit_defaults=True, tag="machine"):
    """First line of ``host.jsonl``; also the ``fingerprint`` of a run.

    A missing value has its reason in ``unavailable``.
    """

    hostname_hash: str | None = None
    kernel: str | None = None
    cpu_model: str | None = None
    num_cpus: int | None = None
    num_allowed_cpus: int | None = None
    #: CPU quota of the tightest enclosing cgroup, in cores.
    cpu_quota_cores: float | None = None
    threads_per_core: int | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    shm_bytes: int | None = None
    cgroup_version: int | None = None
    in_container: bool | None = None
    gpus: list[dict[str, Any]] = []
    driver: str | None = None
    unavailable: dict[str, str] = {}
