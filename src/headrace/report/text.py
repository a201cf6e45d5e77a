"""Words that terminal, HTML and notebook share. Pure: a run goes in, plain sentences come out, without markup."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import msgspec

from headrace.core import units
from headrace.records.run import CauseName, Change, Evidence, Finding, Hotspot, Loader, Overhead, Process, Run

#: What a cause means, in the words of ``docs/causes``.
CAUSE_WORDS: dict[CauseName, str] = {
    "compute": "the device is the limit",
    "copy": "copies from host to device hold the step up",
    "link": "the PCIe link is below what device and slot have",
    "sync": "the host waits for the device inside the step",
    "launch": "the host cannot issue work fast enough",
    "throttle": "the device is slowed down by its power or heat limit",
    "outside": "evaluation, checkpoints or logging between steps",
    "rank": "another rank is late",
    "storage": "dataset code is blocked on a file, a peer or a lock",
    "workers": "dataset code is on a core and whole cores are idle",
    "preprocess": "dataset code uses all cores there are",
    "oversubscribed": "dataset code waits for cores",
    "collate": "building the batch takes the time",
    "transport": "handing batches from worker to trainer takes the time",
    "pin": "page-locking batches takes the time",
    "straggler": "a few slow samples hold ready batches back",
    "epoch": "pauses where an epoch starts",
    "memory": "memory is short",
    "unknown": "the evidence does not separate two causes",
}
NOT_DATA: frozenset[CauseName] = frozenset({"compute", "copy", "link", "sync", "launch", "throttle", "outside", "rank"})

TIME_WORDS = {
    "step": "step",
    "stall": "waiting for data",
    "epoch": "epoch starts",
    "other_loader": "another loader",
    "copy": "copy",
    "sync": "sync",
    "launch": "launch",
    "rank": "late rank",
    "outside": "outside steps",
}
WAIT_WORDS = {
    "queued": "queued",
    "fetch": "fetching",
    "collate": "collating",
    "transport": "in transport",
    "pin": "being pinned",
    "reorder": "ready, out of order",
    "unseen": "not seen",
}
_NOTHING_TO_GAIN = "Nothing to gain from data"
LANE_WORDS = {"wait": "data wait", "epoch": "data wait at an epoch start"}
_POINTER_WORDS = {"gpus": "GPU", "gpu": "GPU", "nvml": "GPU", "psi": "pressure (PSI)"}


def clean(text: object) -> str:
    """Returns a user's string without control characters, which could rewrite the terminal that shows it."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def loaders(run: Run) -> Iterator[tuple[Process, Loader]]:
    """All loaders with their processes, in the record's order."""
    return ((process, loader) for process in run.processes for loader in process.loaders)


def subject(run: Run) -> tuple[Process, Loader] | None:
    """The loader that the run's finding is about: the one that carries it, else the one that costs most."""
    pairs = list(loaders(run))
    carrying = [pair for pair in pairs if run.finding is not None and pair[1].finding == run.finding]
    return max(carrying or pairs, key=lambda pair: cost_ns(pair[1]), default=None)


def cost_ns(loader: Loader) -> float:
    """Total stall of a loader, for sorting only: -1 where it is not known."""
    if loader.stall_frac is None or loader.step_ns is None:
        return -1.0
    return loader.stall_frac * loader.num_steps * loader.step_ns.mean


def finding_of(run: Run) -> Finding | None:
    """The run's finding, or its subject's where the run carries none."""
    found = subject(run)
    return run.finding or (found[1].finding if found else None)


def device(run: Run) -> str:
    """``the device``, or ``the simulated device`` where it was one."""
    found = subject(run)
    return "the simulated device" if found and found[1].simulated else "the device"


def headline(run: Run) -> str:
    """The verdict in one sentence."""
    finding = finding_of(run)
    if finding is None:
        reason = run.unavailable.get("/finding") or "no training loop was seen"
        return f"no finding: {clean(reason)}"
    waits = _waits(finding, device(run))
    if finding.cause == "compute":
        return f"{_NOTHING_TO_GAIN}: {device(run)} is the limit{_waits_once(run, finding)}"
    if finding.cause == "unknown":
        return f"{waits}; cause: unknown{_between(finding)}"
    if finding.cause in NOT_DATA:
        share = f", {units.percent(finding.share_frac)} of the time" if finding.share_frac is not None else ""
        return f"not a data problem; cause: {finding.cause}{share} ({waits})"
    return f"{waits}; cause: {finding.cause}"


def _waits_once(run: Run, finding: Finding) -> str:
    """For ``compute``: the steady wait, and apart from it a start that happens once."""
    found = subject(run)
    steady = found[1].steady_stall_frac if found else None
    if steady is None or finding.stall_frac is None:
        return ""
    said = f" (it waits for data {units.percent(steady)} of a step"
    once = finding.stall_frac - steady
    return said + (f"; starting took {units.percent(once)} of this run)" if once > 0.1 else ")")


def _waits(finding: Finding, who: str) -> str:
    if finding.stall_frac is None:
        return f"how long {who} waits for data was {units.MISSING}"
    return f"{who} waits for data {units.percent(finding.stall_frac)} of the time"


def _between(finding: Finding) -> str:
    if finding.between is None:
        return ""
    return f", {finding.between[0]} or {finding.between[1]}"


def reason(finding: Finding) -> str:
    """Why: the finding's own summary, else what its cause means."""
    summary = re.sub(r"(?<=\d)%", " %", clean(finding.summary)).strip()
    if finding.cause == "compute":
        summary = summary.removeprefix(_NOTHING_TO_GAIN).lstrip(": ")  # the headline says it already
    return summary or CAUSE_WORDS[finding.cause]


def certainty(run: Run) -> str:
    """``confidence high; stall 58 % without epoch starts (95 % interval 56 % to 60 %)``."""
    finding, found = finding_of(run), subject(run)
    if finding is None:
        return ""
    words = f"confidence {finding.confidence}"
    if found and found[1].steady_stall_frac is not None and found[1].stall_ci is not None:
        # The interval is one over steady steps, so it stands beside their stall and not beside the headline's.
        interval = units.percent_range(found[1].stall_ci)
        words += f"; stall {units.percent(found[1].steady_stall_frac)} without epoch starts (95 % interval {interval})"
    return words


def who(process: Process) -> str:
    """``rank 3`` or ``pid 4711``."""
    return f"pid {process.pid}" if process.rank is None else f"rank {process.rank}"


def settings(loader: Loader) -> str:
    """How a loader is set, without what is not known: ``train, batch 64, 4 workers (fork), pinned``."""
    parts: list[str] = [loader.role if loader.role != "unknown" else "role unknown"]
    if loader.batch_size is not None:
        parts.append(f"batch {loader.batch_size}")
    if loader.num_workers is not None:
        method = f" ({loader.start_method})" if loader.start_method and loader.num_workers else ""
        parts.append(units.plural(loader.num_workers, "worker") + method)
    if loader.pin_memory is not None:
        parts.append("pinned" if loader.pin_memory else "unpinned")
    if loader.prefetch_factor is not None and loader.num_workers:
        parts.append(f"prefetch {loader.prefetch_factor} per worker")
    if loader.persistent_workers and loader.num_workers:
        parts.append("persistent workers")
    return ", ".join(parts)


def seen(loader: Loader) -> str:
    """What was observed: ``1,200 steps from 3 iterators``; also says when no DataLoader stands behind it."""
    if loader.kind == "proc" and not loader.num_steps:
        return "seen from /proc alone, where steps cannot be counted"
    iterators = f" from {units.plural(loader.num_iterators, 'iterator')}" if loader.num_iterators else ""
    words = units.plural(loader.num_steps, "step") + iterators
    kinds = {
        "dataloader": "",
        "call": "; the loader is what --data names",
        "stacks": "; no DataLoader was seen, only optimizer steps and sampled stacks",
        "proc": "; seen from /proc alone",
    }
    return words + kinds[loader.kind]


def speed(loader: Loader) -> str:
    """Rate now and at the ceiling, or an empty string where neither is known."""
    if loader.samples_per_s is None:
        return ""
    words = units.rate(loader.samples_per_s, "samples")
    if loader.ceiling_samples_per_s is not None:
        words += f" now, {units.rate(loader.ceiling_samples_per_s, 'samples')} if data were free"
    return words


def parts(fracs: msgspec.Struct, words: dict[str, str]) -> list[tuple[str, str, float]]:
    """Non-zero parts of a ``TimeFrac`` or ``WaitFrac`` as (key, words, fraction); time keeps its order."""
    values = msgspec.structs.asdict(fracs)
    return [(key, words[key], values[key]) for key in words if values[key] >= 0.0005]


def evidence(row: Evidence) -> tuple[str, str]:
    """Name and value of an evidence row."""
    return clean(row.name).replace("_", " "), clean(units.quantity(row.value, row.unit))


def gain(change: Change) -> str:
    """The predicted speed-up of a change."""
    if change.speedup is None and change.speedup_ci is not None:
        low, high = change.speedup_ci
        return f"between {units.speedup(low)} and {units.speedup(high)}: one run does not tell more"
    if change.speedup is None:
        return "gain not predicted"
    return f"predicted {units.speedup_range(change.speedup, change.speedup_ci)}"


def from_to(change: Change) -> str:
    """``4 -> 8``, ``8`` where it was not set before, or an empty string."""
    if change.to is None:
        return "" if change.from_ is None else f"from {clean(change.from_)}"
    return clean(change.to) if change.from_ is None else f"{clean(change.from_)} -> {clean(change.to)}"


def hotspot(spot: Hotspot) -> str:
    """``71 % in PIL JPEG decode (running), load at PIL/ImageFile.py:300``."""
    what = f"in {clean(spot.what)} " if spot.what else ""
    return f"{units.percent(spot.share_frac)} {what}({clean(spot.state)}), {clean(spot.function)} at {clean(spot.site)}"


def overhead(cost: Overhead | None) -> str:
    """What watching cost."""
    if cost is None:
        return units.MISSING
    known = []
    if cost.trainer_frac is not None:
        known.append(f"{units.percent(cost.trainer_frac)} of the trainer's time")
    if cost.trainer_ns_per_step is not None:
        known.append(f"{units.duration(cost.trainer_ns_per_step)} per step")
    if cost.sampler_cores is not None:
        known.append(f"sampler {units.number(cost.sampler_cores)} cores")
    return ", ".join(known) or units.MISSING


def ended(run: Run) -> str:
    """How the program ended, in words."""
    took = "" if run.duration_ns is None else f" after {units.duration(run.duration_ns)}"
    if run.ended == "signal":
        return f"killed by {_signal_name(run.signal)}{took}"
    if run.ended == "steps":
        return f"observed as long as was asked{took}; the program went on alone"
    if run.ended == "lost":
        return f"headrace was killed before the program ended; this is what was seen{took}"
    code = "an unknown exit code" if run.exit_code is None else f"exit code {run.exit_code}"
    return f"ended with {code}{took}"


def _signal_name(number: int | None) -> str:
    if number is None:
        return "an unknown signal"
    known = {item.value: item.name for item in signal.Signals}
    return known.get(number, f"signal {number}") + (", often out of memory" if number == 9 else "")


def unreported(run: Run) -> list[str]:
    """Processes without a loader and why, one line per reason."""
    pids: dict[str, list[int]] = {}
    for process in run.processes:
        if not process.loaders and process.note:
            pids.setdefault(clean(process.note), []).append(process.pid)
    return [f"{_pids(found)}: {note}" for note, found in pids.items()]


def _pids(pids: list[int]) -> str:
    shown = ", ".join(str(pid) for pid in pids[:4]) + (", ..." if len(pids) > 4 else "")
    return f"process {shown}" if len(pids) == 1 else f"{len(pids)} processes ({shown})"


def missing(run: Run) -> list[str]:
    """What could not be had, one line per reason: ``GPU, driver: unavailable: no NVIDIA driver``."""
    names: dict[str, list[str]] = {}
    for pointer, why in run.unavailable.items():
        found = names.setdefault(clean(why), [])
        name = _pointer_words(pointer)
        if name not in found:
            found.append(name)
    return [f"{', '.join(found)}: unavailable: {why}" for why, found in names.items()]


def _pointer_words(pointer: str) -> str:
    """The last key of a JSON pointer in words: ``/processes/0/loaders/1/wait_frac`` is ``wait``."""
    keys = [key for key in clean(pointer).split("/") if key and not key.isdecimal()]
    last = keys[-1] if keys else "all"
    words = re.sub(r"_(bytes|ns|frac|cores)$", "", last).replace("~1", "/").replace("~0", "~").replace("_", " ")
    return _POINTER_WORDS.get(last, re.sub(r"\bcpu\b", "CPU", words))
