"""``headrace.run/1``: the record of one observed run. A saved run is the only thing between measuring and reporting.

Closed enumerations are ``Literal`` types, so that the published JSON Schema lists them. A value that could not be had
is ``None`` and its JSON pointer stands in ``Run.unavailable`` with the reason. Readers ignore unknown keys.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

RUN_FORMAT = "headrace.run/1"

CauseName = Literal[
    "compute", "copy", "link", "sync", "launch", "throttle", "outside", "rank",
    "storage", "workers", "preprocess", "oversubscribed",
    "collate", "transport", "pin", "straggler", "epoch", "memory", "unknown",
]  # fmt: skip
Confidence = Literal["high", "medium", "low"]
Role = Literal["train", "validation", "unknown"]
Ended = Literal["exit", "signal", "steps", "lost"]

MAX_SERIES_STEPS = 5_000
MAX_LANE_EVENTS = 50_000


class Evidence(msgspec.Struct, kw_only=True):
    """One measured row behind a finding. ``unit``: e.g. ``frac``, ``ns``, ``bytes``, ``cores``, ``count``, ``text``."""

    name: str
    value: float | int | str | None
    unit: str


class Change(msgspec.Struct, kw_only=True):
    """What to change, the line to write, and what it is predicted to bring (ratio of step rates, 1.0 = nothing)."""

    what: str
    from_: Any = msgspec.field(name="from", default=None)
    to: Any = None
    line: str | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None


class RunnerUp(msgspec.Struct, kw_only=True):
    """The second most likely cause and its share of the loader's time."""

    cause: CauseName
    share_frac: float


class Finding(msgspec.Struct, kw_only=True):
    """finding = cause + evidence + change. ``share_frac`` is the cause's share of the loader's whole time."""

    cause: CauseName
    stall_frac: float | None
    confidence: Confidence
    summary: str
    share_frac: float | None = None
    evidence: list[Evidence] = []
    runner_up: RunnerUp | None = None
    changes: list[Change] = []
    #: For ``unknown``: the two causes that the evidence does not separate, and the command that would.
    between: tuple[CauseName, CauseName] | None = None
    separate_with: str | None = None


class StepNs(msgspec.Struct, kw_only=True):
    """Step time, steady steps only (an epoch's first step is not one)."""

    mean: float
    p50: float
    p95: float


class TimeFrac(msgspec.Struct, kw_only=True):
    """Where the loader's whole observed time went; sums to 1.

    ``step``: the step body. ``stall``: this loader's stall in steady steps. ``epoch``: the stall at epoch starts and
    ends. ``other_loader``: the wait for another loader inside the step. ``copy``/``sync``/``launch``: device idle for
    these. ``rank``: waiting for a late rank. ``outside``: evaluation, checkpoints, logging.
    """

    step: float
    stall: float
    epoch: float
    other_loader: float
    copy: float
    sync: float
    launch: float
    rank: float
    outside: float


class WaitFrac(msgspec.Struct, kw_only=True):
    """Where the awaited batch was during the data wait; sums to 1. ``reorder``: ready, but out of order.

    ``unseen``: the worker's side of it was not recorded.
    """

    queued: float
    fetch: float
    collate: float
    transport: float
    pin: float
    reorder: float
    unseen: float


class ServiceNs(msgspec.Struct, kw_only=True):
    """Mean time per batch in each stage, whether or not anybody waited for it. ``fetch`` excludes collate."""

    fetch: float | None = None
    fetch_p95: float | None = None
    fetch_on_cpu: float | None = None
    fetch_run_queue: float | None = None
    fetch_blocked: float | None = None
    collate: float | None = None
    transport: float | None = None
    pin: float | None = None
    copy: float | None = None
    step: float | None = None


class Series(msgspec.Struct, kw_only=True):
    """Columns over steps, at most MAX_SERIES_STEPS, the worst among them.

    Times in ns; ``start_ns`` counts from the run's start.
    """

    step_idx: list[int] = []
    start_ns: list[int] = []
    step_ns: list[int] = []
    wait_ns: list[int] = []
    stall_ns: list[int] = []
    epoch_start: list[bool] = []
    num_steps_seen: int = 0


LaneKind = Literal[
    "wait", "step", "epoch", "fetch", "collate", "transport", "pin", "copy", "sync", "backward", "optimizer", "save",
    "dist",
]  # fmt: skip


class Lane(msgspec.Struct, kw_only=True):
    """One thread of execution in the picture: the trainer, a worker, the pin thread, the copies."""

    name: str
    pid: int
    tid: int | None = None


class Lanes(msgspec.Struct, kw_only=True):
    """Events on lanes, at most MAX_LANE_EVENTS. Columns of equal length; times count from the run's start.

    ``kind`` indexes ``kinds``; ``batch`` is the batch number or -1.
    """

    lanes: list[Lane] = []
    kinds: list[LaneKind] = []
    lane: list[int] = []
    kind: list[int] = []
    start_ns: list[int] = []
    dur_ns: list[int] = []
    batch: list[int] = []


class Hotspot(msgspec.Struct, kw_only=True):
    """Where dataset code was seen by the stack sampler. ``state``: ``running`` or what it was blocked on."""

    share_frac: float
    site: str
    function: str
    state: str
    what: str | None = None


class Loader(msgspec.Struct, kw_only=True):
    """One DataLoader (all iterators made at one site), or what stands in for one."""

    site: str
    role: Role
    #: ``dataloader``, ``call`` (--data) or ``stacks`` (no loader seen: optimizer steps and sampled stacks).
    kind: Literal["dataloader", "call", "stacks", "proc"] = "dataloader"
    dataset: str | None = None
    batch_size: int | None = None
    num_workers: int | None = None
    start_method: str | None = None
    pin_memory: bool | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    in_order: bool | None = None
    num_iterators: int = 0
    num_steps: int = 0
    step_ns: StepNs | None = None
    stall_frac: float | None = None
    steady_stall_frac: float | None = None
    stall_ci: tuple[float, float] | None = None
    time_frac: TimeFrac | None = None
    wait_frac: WaitFrac | None = None
    service_ns: ServiceNs | None = None
    samples_per_s: float | None = None
    ceiling_samples_per_s: float | None = None
    simulated: bool = False
    hotspots: list[Hotspot] = []
    series: Series | None = None
    lanes: Lanes | None = None
    finding: Finding | None = None


class Process(msgspec.Struct, kw_only=True):
    """One process that iterated a loader, or a Python that never reported (``loaders`` empty, reason in ``note``)."""

    pid: int
    rank: int | None = None
    argv: list[str] = []
    python: str | None = None
    torch: str | None = None
    note: str | None = None
    loaders: list[Loader] = []


class Overhead(msgspec.Struct, kw_only=True):
    """What watching cost in this run: share of the trainer's time in hooks, ns per step, CPU of the sampler."""

    trainer_frac: float | None = None
    trainer_ns_per_step: float | None = None
    sampler_cores: float | None = None


class Run(msgspec.Struct, kw_only=True):
    """The whole record, as in ``run --json``."""

    format: Literal["headrace.run/1"] = "headrace.run/1"
    headrace: str
    command: list[str]
    started_unix_ns: int | None = None
    duration_ns: int | None = None
    ended: Ended
    exit_code: int | None = None
    signal: int | None = None
    finding: Finding | None = None
    processes: list[Process] = []
    fingerprint: dict[str, Any] = {}
    overhead: Overhead | None = None
    notes: list[str] = []
    unavailable: dict[str, str] = {}
