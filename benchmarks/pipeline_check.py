"""Does ``headrace.core.pipeline`` predict what torch's DataLoader really does?

Each case is a dataset and a step body with known kinds of cost: work on a core (a fixed amount of work, not of time),
blocked time (sleep), rare slow batches. Service times are measured once per round with ``--measure`` workers by simple
wrappers, every configuration is predicted from them, and then run for real. Rounds are interleaved: machine noise hits
all configurations alike. Prints predicted / measured per configuration, the median over the runs during which nobody
else used the machine, and how often the real step lay inside the predicted interval.

    python benchmarks/pipeline_check.py [--seconds 2] [--rounds 2] [--measure 1] [--max-others 0.2] [--case NAME ...]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from headrace.core.pipeline import SERVE_SHARE_FRAC, Config, Measured, Prediction, predict
from headrace.core.stats import mean

LOOPS_PER_MS = 12_000  # set by calibrate()


def work(ms: float) -> None:
    """A fixed amount of pure Python work, about ``ms`` on an idle core."""
    value = 1
    for _ in range(int(ms * LOOPS_PER_MS)):
        value = value * 3 & 0xFFFF


def calibrate() -> None:
    """Set LOOPS_PER_MS from the fastest of several tries."""
    global LOOPS_PER_MS
    best = float("inf")
    for _ in range(20):
        began = time.thread_time_ns()
        work(5)
        best = min(best, time.thread_time_ns() - began)
    LOOPS_PER_MS = int(LOOPS_PER_MS * 5e6 / best)


def thread_ns() -> tuple[int, int, int]:
    """(wall, on-CPU, run-queue) ns of this thread so far."""
    # schedstat's on-CPU time of a running thread is stale by up to a tick, thread_time_ns is not.
    queue = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.monotonic_ns(), time.thread_time_ns(), queue


@dataclass(frozen=True)
class Case:
    """Costs of one synthetic job, in ms; one batch in ``slow_every`` takes ``slow_ms`` longer (blocked)."""

    name: str
    cpu: float = 0.0
    blocked: float = 0.0
    slow_every: int = 0
    slow_ms: float = 0.0
    body_cpu: float = 0.0
    body_blocked: float = 0.0
    numel: int = 1000
    tensors: int = 1


CASES = [
    Case("blocked fetch, sleeping body", blocked=12, body_blocked=5),
    Case("mixed fetch, sleeping body", cpu=4, blocked=6, body_blocked=4, numel=100_000),
    Case("cpu fetch, sleeping body", cpu=10, body_blocked=5, numel=600_000),
    Case("cpu fetch, cpu body", cpu=10, body_cpu=6, numel=100_000),
    Case("stragglers, sleeping body", blocked=5, slow_every=37, slow_ms=150, body_blocked=5),
    Case("stragglers on a fixed beat", blocked=5, slow_every=8, slow_ms=40, body_blocked=5),
    Case("many tensors, cheap body", cpu=2, body_blocked=1, tensors=64, numel=256),
]
CONFIGS = [
    Config(num_workers=0),
    Config(num_workers=1),
    Config(num_workers=2),
    Config(num_workers=2, prefetch_factor=8),
    Config(num_workers=2, in_order=False),
    Config(num_workers=4),
    Config(num_workers=4, prefetch_factor=1),
    Config(num_workers=4, prefetch_factor=8),
]


class Batches(Dataset[Any]):
    """Yields ready batches with what they cost: (wall, on-CPU, run-queue ns) and the process CPU ns at the end."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, idx: int) -> Any:
        start = thread_ns()
        case = self.case
        work(case.cpu * (0.8 + 0.4 * (idx * 7919 % 101) / 100))
        slow = case.slow_every and idx % case.slow_every == case.slow_every - 1
        if case.blocked:
            time.sleep((case.blocked + (case.slow_ms if slow else 0)) / 1000)
        data = [torch.ones(case.numel) for _ in range(case.tensors)]
        end = thread_ns()
        return data, [b - a for a, b in zip(start, end, strict=True)], time.process_time_ns()


def _first(items: list[Any]) -> Any:
    return items[0]


@dataclass
class Real:
    """One real run: step and wait ns after warm-up, service times, cores used by others meanwhile."""

    steps_ns: list[int]
    waits_ns: list[int]
    bodies: list[tuple[int, int, int]]
    next_cpu_ns: list[int]
    fetches: list[tuple[int, int, int]]
    overhead_ns: list[int]
    others_cores: float


def _busy_ns() -> int:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = sum(map(int, fields)) - int(fields[3]) - int(fields[4])
    return ticks * 10**9 // os.sysconf("SC_CLK_TCK")


def _own_ns(pids: list[int]) -> int:
    total = 0
    for pid in [os.getpid(), *pids]:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total * 10**9 // os.sysconf("SC_CLK_TCK")


def _body(case: Case) -> None:
    if case.body_cpu:
        work(case.body_cpu)
    if case.body_blocked:
        time.sleep(case.body_blocked / 1000)


def run_real(case: Case, config: Config, seconds: float) -> Real:
    """Iterate a real DataLoader for ``seconds`` after a warm-up of a quarter of it."""
    more = {"prefetch_factor": config.prefetch_factor, "in_order": config.in_order} if config.num_workers else {}
    loader = DataLoader(Batches(case), batch_size=1, collate_fn=_first, num_workers=config.num_workers, **more)
    batches: Iterator[Any] = iter(loader)
    pids = [worker.pid for worker in getattr(batches, "_workers", [])]
    real = Real([], [], [], [], [], [], 0.0)
    processes: dict[int, int] = {}
    warm_until = time.monotonic() + seconds / 4
    busy = own = began = 0
    num = 0
    while True:
        start = thread_ns()
        _, spent, process_end = next(batches)
        ready = thread_ns()
        _body(case)
        end = thread_ns()
        worker = num % max(1, config.num_workers)
        if time.monotonic() < warm_until:
            busy, own, began = _busy_ns(), _own_ns(pids), time.monotonic_ns()
        else:
            real.steps_ns.append(end[0] - start[0])
            real.waits_ns.append(ready[0] - start[0])
            real.bodies.append((end[0] - ready[0], end[1] - ready[1], end[2] - ready[2]))
            real.next_cpu_ns.append(ready[1] - start[1])
            real.fetches.append((spent[0], spent[1], spent[2]))
            if worker in processes:
                real.overhead_ns.append(process_end - processes[worker] - spent[1])
        processes[worker] = process_end
        num += 1
        if time.monotonic() > warm_until + seconds and len(real.steps_ns) >= 10:
            break
    wall = time.monotonic_ns() - began
    real.others_cores = max(0.0, (_busy_ns() - busy - (_own_ns(pids) - own)) / wall)
    del batches
    return real


def to_measured(real: Real, *, workers: bool, others_cores: float) -> Measured:
    """Service times of a real run, as headrace would record them."""
    handed = mean(real.overhead_ns) if workers else 0.0
    fetch = [(float(cpu), float(max(0, wall - cpu - queue))) for wall, cpu, queue in real.fetches]
    bodies = [float(wall - queue) for wall, _, queue in real.bodies]
    on_cpu = float(sum(cpu for _, cpu, _ in real.bodies))
    return Measured(
        fetch=fetch,
        body_ns=bodies,
        cores=float(len(os.sched_getaffinity(0))),
        body_on_cpu_frac=min(1.0, on_cpu / sum(bodies)),
        serialise_ns=handed * (1 - SERVE_SHARE_FRAC),
        serve_ns=handed * SERVE_SHARE_FRAC,
        deserialise_ns=mean(real.next_cpu_ns) if workers else 0.0,
        shared_cpu_cores=others_cores,
    )


def _name(config: Config) -> str:
    order = "" if config.in_order else " any order"
    return f"{config.num_workers} workers x{config.prefetch_factor}{order}"


@dataclass
class Row:
    """One configuration over all quiet runs: predicted / measured, from the base run's and its own service times."""

    ratios: list[float]
    own_ratios: list[float]
    inside: list[bool]
    num_dropped: int = 0
    predicted: Prediction | None = None
    step_ns: float = 0.0

    def __str__(self) -> str:
        if self.predicted is None:
            return f"no quiet run, {self.num_dropped} dropped"
        low, mid, high = self.predicted.step_ns_lo, self.predicted.step_ns_mean, self.predicted.step_ns_hi
        return (
            f"real {self.step_ns / 1e6:6.2f} ms  predicted {mid / 1e6:6.2f} ({low / 1e6:5.2f} ..{high / 1e6:5.2f})  "
            f"ratio {median(self.ratios):5.3f} [{min(self.ratios):.3f} {max(self.ratios):.3f}]  "
            f"own {median(self.own_ratios):5.3f}  {self.predicted.bound:9} "
            f"inside {sum(self.inside)}/{len(self.inside)}, {self.num_dropped} dropped"
        )


def _add(row: Row, base: Real, real: Real, config: Config, args: argparse.Namespace) -> None:
    """Count a pair of runs, unless other programs used the machine meanwhile."""
    if max(base.others_cores, real.others_cores) > args.max_others:
        row.num_dropped += 1
        return
    row.step_ns = mean(real.steps_ns)
    row.predicted = predict(to_measured(base, workers=args.measure > 0, others_cores=real.others_cores), config)
    own = predict(to_measured(real, workers=config.num_workers > 0, others_cores=real.others_cores), config)
    row.ratios.append(row.predicted.step_ns_mean / row.step_ns)
    row.own_ratios.append(own.step_ns_mean / row.step_ns)
    row.inside.append(row.predicted.step_ns_lo <= row.step_ns <= row.predicted.step_ns_hi)


def check(case: Case, args: argparse.Namespace) -> list[float]:
    """Run one case; returns predicted / measured of every configuration."""
    rows = {config: Row([], [], []) for config in CONFIGS}
    for _ in range(args.rounds):
        base = run_real(case, Config(num_workers=args.measure), args.seconds)
        for config, row in rows.items():
            _add(row, base, run_real(case, config, args.seconds), config, args)
    seen = to_measured(base, workers=args.measure > 0, others_cores=0.0)
    worker_ms, trainer_ms = (seen.serialise_ns + seen.serve_ns) / 1e6, seen.deserialise_ns / 1e6
    print(f"\n{case.name}  (transport: worker {worker_ms:.2f} ms, trainer {trainer_ms:.2f} ms)")
    for config, row in rows.items():
        print(f"  {_name(config):22} {row}", flush=True)
    return [median(row.ratios) for row in rows.values() if row.ratios]


def main() -> None:
    """Check all cases (or those named) and print the worst and the median error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--measure", type=int, default=1)
    parser.add_argument("--max-others", type=float, default=0.2, help="cores; a run with more in use is dropped")
    parser.add_argument("--case", action="append", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    calibrate()
    chosen = [case for case in CASES if not args.case or any(word in case.name for word in args.case)]
    errors = sorted(abs(ratio - 1) for case in chosen for ratio in check(case, args))
    if errors:
        print(f"\nerror: median {median(errors):.1%}, worst {errors[-1]:.1%} of {len(errors)} configurations")


if __name__ == "__main__":
    main()
