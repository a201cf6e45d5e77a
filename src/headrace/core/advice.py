"""What to change for each cause, the line to write, and what it is predicted to bring. Pure.

Advice is checked before it is given: where workers cannot start as the program stands, the first change is the one that
lets them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..records.run import Change, Hotspot
from . import stats, whatif
from .causes import Verdict, pool_frac
from .charge import NS_PER_TENSOR, SERIALISE_NS_PER_BYTE
from .lines import dataloader_line
from .measure import Facts
from .pipeline import Measured
from .whatif import Gain


def changes(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    """The changes for this verdict, the most useful first. Empty for ``compute``: nothing to gain from data."""
    make = _BY_CAUSE.get(verdict.cause)
    found = make(facts, verdict, hotspots) if make else []
    return [change for change in found if change.speedup is None or change.speedup >= 1.01]


def _change(what: str, gain: Gain | None, line: str | None = None, from_: Any = None, to: Any = None) -> Change:
    if gain is None:
        return Change(what=what, from_=from_, to=to, line=line)
    lo, mid, hi = (round(value, 3) for value in (gain.lo, gain.speedup, gain.hi))
    return Change(what=what, from_=from_, to=to, line=line, speedup=mid, speedup_ci=(min(lo, mid), max(hi, mid)))


def _workers(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    best = whatif.best_workers(facts, prefetch=(2, 4) if facts.num_workers else (2,))
    if best is None:
        return [_change("num_workers", None)]
    config, gain = best
    found = list(_first_things_first(facts))
    if config.num_workers != facts.num_workers or config.prefetch_factor != whatif.current(facts).prefetch_factor:
        line = dataloader_line(
            facts.view.info,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor if config.prefetch_factor != 2 else None,
            persistent_workers=True if len(facts.view.passes) > 1 else None,
        )
        found.append(_change("num_workers", gain, line, facts.num_workers, config.num_workers))
    return found


def _first_things_first(facts: Facts) -> list[Change]:
    """What must change before workers can start: the guard for spawn, a dataset that pickles."""
    info = facts.view.info
    if facts.num_workers or info.get("start_method") in (None, "fork"):
        return []
    found = []
    if info.get("guard") is False:
        found.append(
            Change(what="main guard", to="if __name__ == '__main__':", line="if __name__ == '__main__':\n    main()")
        )
    if info.get("pickles") is False:
        found.append(
            Change(
                what="picklable dataset",
                to="module level",
                line="# move the dataset, collate_fn and their functions to module level",
            )
        )
    return found


def _storage(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    found = [] if _on_lock(hotspots) else _workers(facts, verdict, hotspots)
    where = _where(hotspots)
    without = whatif.gain(facts, change=_without_blocked)
    found.append(
        _change("blocking in the dataset", without, f"# {where}: stage it locally, pack it into shards, or cache it")
    )
    return found


def _on_lock(hotspots: list[Hotspot]) -> bool:
    blocked = [spot for spot in hotspots if spot.state != "running"]
    return bool(blocked) and blocked[0].state.startswith("lock")


def _where(hotspots: list[Hotspot]) -> str:
    blocked = [spot for spot in hotspots if spot.state != "running"]
    return f"{blocked[0].site} waits for {blocked[0].state}" if blocked else "the dataset waits"


def _without_blocked(base: Measured) -> Measured:
    return dataclasses.replace(base, fetch=[(on_cpu, 0.0) for on_cpu, _ in base.fetch])


def _preprocess(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    top = next((spot for spot in hotspots if spot.state == "running"), None)
    share = _share_of(top, hotspots) if top else 0.5
    where = f"{top.site} ({top.function})" if top else "the dataset's slowest function"
    gain = whatif.gain(facts, change=lambda base: _scale_cpu(base, 1.0 - share))
    found = [
        _change(
            "work per sample",
            gain,
            f"# {where}: do it once and store the result, or use a faster one",
            1.0,
            round(1 - share, 3),
        )
    ]
    free = whatif.gain(facts, change=lambda base: _scale_cpu(base, 0.05))
    line = "# store the samples as the model takes them (decoded, resized, tokenised)"
    found.append(_change("all work per sample", free, line, 1.0, 0.05))
    best = whatif.best_workers(facts)
    if best is not None and best[0].num_workers != facts.num_workers and best[1].speedup > 1.05:
        found.insert(0, _workers(facts, verdict, hotspots)[-1])
    return found


def _share_of(top: Hotspot, hotspots: list[Hotspot]) -> float:
    """What storing its result would save: the whole function; of ``__getitem__`` the line, or nothing would be left."""
    if top.function.endswith("__getitem__"):
        return top.share_frac
    file = top.site.rpartition(":")[0]
    same = (spot for spot in hotspots if spot.function == top.function and spot.site.rpartition(":")[0] == file)
    return min(sum(spot.share_frac for spot in same if spot.state == "running"), 0.95)


def _scale_cpu(base: Measured, factor: float) -> Measured:
    return dataclasses.replace(base, fetch=[(on_cpu * factor, blocked) for on_cpu, blocked in base.fetch])


def _oversubscribed(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    host = facts.host
    if verdict.detail == "threads":
        line = "torch.set_num_threads(1)  # in worker_init_fn; OMP_NUM_THREADS=1, cv2.setNumThreads(0) alike"
        change = Change(what="threads per worker", from_=host.worker_threads, to=1, line=line)
        change.speedup_ci = _threads_range(facts)
        return [change]
    if verdict.detail == "affinity":
        line = "# lift the CPU affinity: taskset, numactl, the batch system's CPU binding"
        return [_change("affinity", affinity_gain(facts), line, host.narrow_cpus, host.machine_cores)]
    if verdict.detail == "workers":
        fewer = fewer_gain(facts)  # None: it cannot be told from this run
        number = max(int(whatif.cores(facts)), 1) * (1 if fewer else 2)
        return [
            _change(
                "num_workers", fewer, dataloader_line(facts.view.info, num_workers=number), facts.num_workers, number
            )
        ]
    line = "# raise the CPU limit: docker --cpus, resources.limits.cpu, cpu.max"
    return [_change("CPU quota", quota_gain(facts), line, host.quota_cores, host.allowed_cores)]


def quota_gain(facts: Facts, num_blocks: int = whatif.NUM_BLOCKS) -> Gain | None:
    """With all allowed cores instead of the quota."""
    if facts.host.quota_cores is None or facts.host.allowed_cores is None:
        return None
    return _with_cores(facts, max(facts.host.allowed_cores - (facts.host.outside_cores or 0.0), 0.5), num_blocks)


def affinity_gain(facts: Facts, num_blocks: int = whatif.NUM_BLOCKS) -> Gain | None:
    """With all cores of the machine that others leave."""
    if facts.host.machine_cores is None:
        return None
    idle = facts.host.machine_idle_cores
    used = facts.host.job_cores or 0.0
    free = facts.host.machine_cores if idle is None else min(facts.host.machine_cores, idle + used)
    return _with_cores(facts, free, num_blocks)


def _with_cores(facts: Facts, cores: float, num_blocks: int) -> Gain | None:
    def change(base: Measured) -> Measured:
        return dataclasses.replace(base, cores=max(cores, base.cores))

    return whatif.gain(facts, change=change, num_blocks=num_blocks)


def _threads_range(facts: Facts) -> tuple[float, float] | None:
    """From a pool that wastes nothing to data for free.

    One run does not tell a pool's waste from its work: its threads spin where they wait for one that has no core, and a
    fetch of one thread took from half to a thirtieth of the pool's CPU (fault scripts 21, 22 and 26). So no number.
    """
    least = threads_gain(facts, waste_frac=0.0)
    top = whatif.ceiling(facts)
    return None if least is None else (round(min(max(least.lo, 1.0), top), 3), round(top, 3))


def threads_gain(facts: Facts, num_blocks: int = whatif.NUM_BLOCKS, waste_frac: float | None = None) -> Gain | None:
    """With one thread per worker: the pool's own time vanishes but for what the work needs.

    Args:
        facts: Of the loader.
        num_blocks: As in ``whatif.gain``.
        waste_frac: Share of the pool's CPU that one thread would not need; None: half of the pool's, a guess that is
            good enough to tell whether the pool matters.
    """
    pool = pool_frac(facts)
    if pool <= 0:
        return None
    base = whatif.measured(facts)
    if base is None:
        return None
    guess = min(pool * 0.5 + (facts.host.worker_system_frac or 0.0) * 0.5, 0.9)
    waste = guess if waste_frac is None else waste_frac

    def change(measured: Measured) -> Measured:
        return dataclasses.replace(measured, fetch=_one_thread(measured, waste), fetch_threads=1.0)

    return whatif.gain(facts, change=change, num_blocks=num_blocks)


def _one_thread(base: Measured, waste: float) -> list[tuple[float, float]]:
    threads = base.fetch_threads
    return [(on_cpu * threads * (1 - waste), 0.0) for on_cpu, _ in base.fetch]


def fewer_gain(facts: Facts, num_blocks: int = whatif.NUM_BLOCKS) -> Gain | None:
    """With as many workers as cores, where each worker repeats work that one of them could do for all.

    Only such work makes a count of workers itself costly; plain decoding takes the same CPU however many share it.
    """
    number = max(int(whatif.cores(facts)), 1)
    if facts.num_workers <= number:
        return None
    repeated = repeated_batches(facts)
    if not repeated:
        return None
    kept = number / facts.num_workers
    tasks = facts.tasks[-whatif.MAX_REPLAY :]

    def change(base: Measured) -> Measured:
        fetch = [
            (on_cpu * (kept if id(task) in repeated else 1.0), blocked)
            for task, (on_cpu, blocked) in zip(tasks, base.fetch, strict=True)
        ]
        return dataclasses.replace(base, fetch=fetch)

    config = dataclasses.replace(whatif.current(facts), num_workers=number)
    return whatif.gain(facts, config, change, num_blocks)


def repeated_batches(facts: Facts) -> set[int]:
    """Batches whose worker did what its neighbours did as well (opened the same shard): ids of their tasks.

    The sign: expensive batches come in runs, next to each other in batch order, that is in different workers at once.
    """
    tasks = sorted(facts.tasks, key=lambda task: (task.resumes, task.idx))
    if len(tasks) < 4 * facts.num_workers:
        return set()
    limit = 3.0 * stats.median([float(task.on_cpu_ns) for task in tasks])
    heavy = [task.on_cpu_ns > limit for task in tasks]
    runs, length = [], 0
    for is_heavy in [*heavy, False]:
        if is_heavy:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    if len(runs) < 2 or stats.mean([float(run) for run in runs]) < 0.4 * facts.num_workers:
        return set()
    return {id(task) for task, is_heavy in zip(tasks, heavy, strict=True) if is_heavy}


def _collate(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    name = facts.view.info.get("collate") or "collate_fn"
    gain = whatif.gain(facts, change=lambda base: dataclasses.replace(base, collate_ns=0.0))
    return [
        _change(
            "collate_fn", gain, f"# {name}: build one array per field and fill it by slices, no Python loop per element"
        )
    ]


def _transport(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    sizes = [task for task in facts.tasks if task.num_bytes is not None]
    tensors = stats.mean([float(t.num_tensors or 0) for t in sizes]) if sizes else 0.0
    num_bytes = stats.mean([float(t.num_bytes or 0) for t in sizes]) if sizes else 0.0
    if tensors > 16 and tensors * 2 * NS_PER_TENSOR > num_bytes * SERIALISE_NS_PER_BYTE:
        gain = whatif.gain(facts, change=_scale_transport(1.5 / tensors))
        return [
            _change(
                "tensors per batch",
                gain,
                "# collate_fn: concatenate into one tensor and split it in the training loop",
                round(tensors),
                1,
            )
        ]
    if facts.charged_ns["latency"] > facts.charged_ns["transport"]:
        return [_no_workers(facts)]
    gain = whatif.gain(facts, change=_scale_transport(0.25))
    line = "# send uint8 and convert on the device: x.to(device).float().div_(255)"
    return [_change("bytes per batch", gain, line, round(num_bytes), round(num_bytes / 4))]


def _no_workers(facts: Facts) -> Change:
    """Small batches at a high rate: waking another process for each costs more than making it."""
    config = dataclasses.replace(whatif.current(facts), num_workers=0)
    line = dataloader_line(facts.view.info, num_workers=0) + "  # small, cheap batches: no other process to wait for"
    return _change("num_workers", whatif.gain(facts, config), line, facts.num_workers, 0)


def _scale_transport(factor: float) -> Callable[[Measured], Measured]:
    def change(base: Measured) -> Measured:
        return dataclasses.replace(
            base,
            serialise_ns=base.serialise_ns * factor,
            serve_ns=base.serve_ns * factor,
            deserialise_ns=base.deserialise_ns * factor,
        )

    return change


def _straggler(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    now = whatif.current(facts)
    found = []
    for prefetch in (4, 8, 16):
        if prefetch <= now.prefetch_factor:
            continue
        gain = whatif.gain(facts, dataclasses.replace(now, prefetch_factor=prefetch))
        line = dataloader_line(facts.view.info, prefetch_factor=prefetch)
        found.append(_change("prefetch_factor", gain, line, now.prefetch_factor, prefetch))
    found.sort(key=lambda change: -(change.speedup or 0.0))
    found = found[:1]
    if now.in_order:
        gain = whatif.gain(facts, dataclasses.replace(now, in_order=False))
        line = dataloader_line(facts.view.info, in_order=False) + "  # batches come in another order"
        found.append(_change("in_order", gain, line, True, False))
    found.sort(key=lambda change: -(change.speedup or 0.0))
    slow = max(facts.tasks, key=lambda task: task.slowest_ns, default=None)
    if slow is not None and slow.slowest_index is not None and slow.slowest_ns:
        found.append(
            Change(
                what="slow sample",
                from_=slow.slowest_index,
                line=f"# dataset[{slow.slowest_index}] takes {slow.slowest_ns / 1e6:.0f} ms",
            )
        )
    return found


def _epoch(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    if facts.num_workers and not facts.view.info.get("persistent_workers"):
        line = dataloader_line(facts.view.info, persistent_workers=True)
        return [_change("persistent_workers", persistent_gain(facts), line, False, True)]
    return [
        _change(
            "work at iter()", whatif.removed(facts, facts.epoch_excess_ns), "# open the dataset once, not in __iter__"
        )
    ]


def persistent_gain(facts: Facts) -> Gain:
    """Every pass but the first starts as the model says a warm pool does: one batch's fetch, no new workers."""
    steps = [step for step in facts.view.steps if step.first]
    fetches = [float(task.fetch1 - task.fetch0) for task in facts.tasks]
    warm = stats.median(fetches) if fetches else 0.0
    saved = 0.0
    for one, first in zip(facts.view.passes, steps, strict=False):
        saved += max(one.iter_ns + one.stop_ns + first.wait_ns - warm, 0.0)
    passes = max(len(facts.view.passes), 1)
    return whatif.removed(facts, saved * (passes - 1) / passes if passes > 1 else 0.0)


def _memory(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    if verdict.detail == "faults":
        from .causes import memory_frac

        share = memory_frac(facts)
        gain = whatif.gain(facts, change=lambda base: _scale_cpu(base, 1.0 - share))
        line = "# keep the dataset's lists as one numpy array or torch tensor: no reference counts, no copied pages"
        return [_change("Python objects in the dataset", gain, line, "list", "array")]
    line = "# raise the memory limit, or fewer workers (each holds prefetch_factor batches)"
    return [_change("memory limit", whatif.gain(facts, change=_without_blocked), line)]


def _outside(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    gain = whatif.removed(facts, facts.parts_ns["outside"])
    what = "checkpoints" if facts.save_ns > 0.5 * facts.parts_ns["outside"] else "pauses between steps"
    line = (
        "# less often, or in the background"
        if what == "checkpoints"
        else "# evaluate and log less often, or in the background"
    )
    return [_change(what, gain, line)]


def _rank(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    return [_change("the late rank", whatif.removed(facts, facts.parts_ns["rank"]), f"# {verdict.detail}")]


def _copy(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    line = dataloader_line(facts.view.info, pin_memory=True) + "  and  x.to(device, non_blocking=True)"
    return [_change("pin_memory", whatif.removed(facts, facts.parts_ns["copy"], 0.5), line, False, True)]


def _sync(facts: Facts, verdict: Verdict, hotspots: list[Hotspot]) -> list[Change]:
    return [
        _change(
            "waits for the device", whatif.removed(facts, facts.parts_ns["sync"], 0.9), "# .item() every n steps only"
        )
    ]


_BY_CAUSE: dict[str, Callable[[Facts, Verdict, list[Hotspot]], list[Change]]] = {
    "workers": _workers,
    "storage": _storage,
    "preprocess": _preprocess,
    "oversubscribed": _oversubscribed,
    "collate": _collate,
    "transport": _transport,
    "straggler": _straggler,
    "epoch": _epoch,
    "memory": _memory,
    "outside": _outside,
    "rank": _rank,
    "copy": _copy,
    "sync": _sync,
    "pin": _copy,
}
