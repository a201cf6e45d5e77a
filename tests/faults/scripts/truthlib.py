"""What every fault script shares: its command line, its own stopwatch, and the truth that owes nothing to headrace.

A script hands ``main`` its header, a function that makes the loader, and its training loop. The loop marks each epoch
and each finished step in a ``Meter``; the same loop runs once over the real loader and once over ``Replay``, batches
cached in memory, which is the data for free. Truth = 1 - (time of the replayed steps) / (time of the real steps).

    script.py                              the planted fault, as headrace sees it
    script.py --fixed                      the advised change applied (header "fixed")
    script.py --set num_workers=4          one knob changed
    script.py --truth [--repeats 3]        real and replayed runs in turn
    --steps N | --seconds S                length; --result FILE: numbers as JSON
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cgroups
import pressure
import torch
from torch.utils._pytree import tree_map

#: Headers give steps for a run of about this many seconds under the fault.
NOMINAL_S = 6.0
#: A run is undisturbed when other programs took less than this many cores.
QUIET_CORES = 0.15
IN_CGROUP = "HEADRACE_FAULTS_IN_CGROUP"

MakeLoader = Callable[[SimpleNamespace], Any]
Train = Callable[[SimpleNamespace, Any, "Meter"], Any]


class Meter:
    """Marks of the training loop's own clock, in ns: each epoch's start, and the end of each of its steps."""

    def __init__(self) -> None:
        self.epochs: list[list[int]] = []
        self.end_ns = 0

    def epoch(self) -> None:
        """An epoch begins: call it before the loop over the loader."""
        self.epochs.append([time.monotonic_ns()])

    def step(self) -> None:
        """A step is finished: call it at the end of the loop's body."""
        self.epochs[-1].append(time.monotonic_ns())

    def finish(self) -> None:
        """The training is over."""
        self.end_ns = time.monotonic_ns()

    @property
    def num_steps(self) -> int:
        return sum(len(marks) - 1 for marks in self.epochs)

    def steady_ns(self) -> float:
        """Mean time of a step; an epoch's first step is not steady."""
        steady = [marks[-1] - marks[1] for marks in self.epochs]
        return sum(steady) / max(1, sum(len(marks) - 2 for marks in self.epochs))

    def all_ns(self) -> float:
        """Mean time of a step with epoch starts and whatever lies between epochs."""
        return (self.end_ns - self.epochs[0][0]) / max(1, self.num_steps)


class Replay:
    """As many batches as an epoch has, out of a few cached ones: the loader that costs nothing."""

    def __init__(self, batches: list[Any], num_batches: int) -> None:
        self.batches = batches
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self.batches), self.num_batches)


def main(fault: dict[str, Any], make_loader: MakeLoader, train: Train, **knobs: Any) -> None:
    """Run the script as its command line says; a script with ``ranks`` runs itself once per rank."""
    args = parse(fault, knobs)
    if fault.get("trainer_threads") is None:
        torch.set_num_threads(1)  # as torchrun does; the step is simulated, and a spinning pool would only add noise
    with _own_cgroup(fault, args):
        if fault.get("ranks", 1) == 1:
            session(fault, args, make_loader, train)
        elif "RANK" in os.environ:
            rank_main(int(os.environ["RANK"]), fault, args, make_loader, train)
        else:
            _start_ranks(fault, args, make_loader, train)


def parse(fault: dict[str, Any], knobs: dict[str, Any]) -> SimpleNamespace:
    """The command line over the header over the script's own defaults."""
    parser = argparse.ArgumentParser(description="fault script; see truthlib.py")
    parser.add_argument("--steps", type=int, help="steps in all, instead of the header's")
    parser.add_argument("--seconds", type=float, default=NOMINAL_S, help="scale the header's steps to about this long")
    parser.add_argument("--start-method", choices=fault["start_methods"], default=fault["start_methods"][0])
    parser.add_argument("--fixed", action="store_true", help="apply the advised change")
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--truth", action="store_true", help="measure the true stall by replay")
    parser.add_argument("--repeats", type=int, default=3, help="of --truth")
    parser.add_argument("--result", type=Path, help="write the numbers here as JSON")
    given = parser.parse_args()
    values = {**knobs, **(fault.get("fixed", {}) if given.fixed else {})}
    for item in given.set:
        name, _, text = item.partition("=")
        if name not in knobs:
            parser.error(f"--set {item}: this script has {', '.join(knobs)}")
        values[name] = _typed(text, knobs[name])
    return SimpleNamespace(**values, **_length(fault, given), **vars(given))


def context(args: SimpleNamespace) -> str | None:
    """``multiprocessing_context`` of a DataLoader: torch allows it only with workers."""
    return args.start_method if args.num_workers else None


def session(fault: dict[str, Any], args: SimpleNamespace, make_loader: MakeLoader, train: Train) -> None:
    """One process's whole run: planted or fixed, or the truth."""
    if args.truth:
        result = _truth(fault, args, make_loader, train)
    else:
        meter = _timed(train, args, make_loader(args))
        result = {"num_steps": meter.num_steps, "steady_ns": meter.steady_ns(), "all_ns": meter.all_ns()}
    if int(os.environ.get("RANK", 0)) != fault.get("truth_rank", 0) and fault.get("ranks", 1) > 1:
        return
    if args.result:
        args.result.write_text(json.dumps(result))
    else:
        print(json.dumps(result))


def rank_main(rank: int, fault: dict[str, Any], args: SimpleNamespace, make_loader: MakeLoader, train: Train) -> None:
    """One rank of a gloo group, between its start and its end."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=fault["ranks"])
    try:
        session(fault, args, make_loader, train)
    finally:
        torch.distributed.destroy_process_group()


def _truth(fault: dict[str, Any], args: SimpleNamespace, make_loader: MakeLoader, train: Train) -> dict[str, Any]:
    """Real and replayed runs in turn, until enough of them went undisturbed (at most twice as many)."""
    num_cached = fault.get("num_cached", 4)
    cached = [tree_map(_private, batch) for batch in itertools.islice(make_loader(args), num_cached)]
    pairs: list[dict[str, float]] = []
    while len(pairs) < 2 * args.repeats and len(_quiet(pairs)) < args.repeats:
        pairs.append(_pair(args, make_loader, train, cached, replay_first=len(pairs) % 2 == 1))
        if fault.get("ranks", 1) > 1 and len(pairs) == args.repeats:
            break  # ranks must run equally often, and each sees its own quiet
    used = _quiet(pairs) if len(_quiet(pairs)) >= args.repeats else pairs
    steady, overall = [pair["steady"] for pair in used], [pair["all"] for pair in used]
    return {
        "steady_stall_frac": statistics.median(steady),
        "stall_frac": statistics.median(overall),
        "steady": steady,
        "all": overall,
        "steady_ns": statistics.median(pair["steady_ns"] for pair in used),
        "outside_cores": statistics.median(pair["outside_cores"] for pair in used),
        "num_runs": len(pairs),
    }


def _quiet(pairs: list[dict[str, float]]) -> list[dict[str, float]]:
    return [pair for pair in pairs if pair["outside_cores"] < QUIET_CORES]


def _pair(
    args: SimpleNamespace, make_loader: MakeLoader, train: Train, cached: list[Any], *, replay_first: bool
) -> dict[str, float]:
    """One real and one replayed run; the order alternates, so that what a run leaves behind falls on both."""
    outside = pressure.Outside()
    replay = Replay(cached, args.steps // args.epochs)
    if replay_first:
        replayed = _timed(train, args, replay)
    real = _timed(train, args, make_loader(args))
    if not replay_first:
        replayed = _timed(train, args, replay)
    if real.num_steps != replayed.num_steps:
        raise RuntimeError(f"{real.num_steps} real steps but {replayed.num_steps} replayed")
    return {
        "steady": 1 - replayed.steady_ns() / real.steady_ns(),
        "all": 1 - replayed.all_ns() / real.all_ns(),
        "steady_ns": real.steady_ns(),
        "outside_cores": outside.cores(),
    }


def _timed(train: Train, args: SimpleNamespace, batches: Any) -> Meter:
    meter = Meter()
    train(args, batches, meter)
    meter.finish()
    return meter


def _private(value: Any) -> Any:
    """Cached batches live in ordinary memory, not in the shared segments that workers made."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _length(fault: dict[str, Any], given: argparse.Namespace) -> dict[str, int]:
    """Steps and epochs: scripts of several epochs keep their epochs' length and get fewer or more of them."""
    epochs, steps = fault.get("epochs", 1), fault["steps"]
    wanted = given.steps or round(steps * given.seconds / NOMINAL_S)
    del given.steps
    if epochs == 1:
        return {"epochs": 1, "steps": max(8, wanted), "steps_per_epoch": max(8, wanted)}
    per_epoch = steps // epochs
    epochs = max(2, round(wanted / per_epoch))
    return {"epochs": epochs, "steps": epochs * per_epoch, "steps_per_epoch": per_epoch}


def _typed(text: str, default: Any) -> Any:
    if text.lower() in ("none", ""):
        return None
    if isinstance(default, bool):
        return text.lower() in ("1", "true", "yes")
    return type(default)(text) if default is not None else json.loads(text)


@contextlib.contextmanager
def _own_cgroup(fault: dict[str, Any], args: SimpleNamespace) -> Iterator[None]:
    """Enter the header's cgroup when a person runs the script alone; the harness has done it before."""
    if "cgroup" not in fault or os.environ.get(IN_CGROUP) or not getattr(args, "limited", True):
        yield
        return
    try:
        with cgroups.limited(cgroups.Limits(**fault["cgroup"])) as group:
            group.enter()
            yield
    except cgroups.Unpermitted as reason:
        sys.exit(f"skipped: {reason}")


def _start_ranks(fault: dict[str, Any], args: SimpleNamespace, make_loader: MakeLoader, train: Train) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), WORLD_SIZE=str(fault["ranks"]))
    torch.multiprocessing.start_processes(
        _ranked, (fault, args, make_loader, train), nprocs=fault["ranks"], start_method="fork"
    )


def _ranked(rank: int, fault: dict[str, Any], args: SimpleNamespace, make_loader: MakeLoader, train: Train) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    rank_main(rank, fault, args, make_loader, train)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
