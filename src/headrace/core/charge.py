"""Which stage has to become faster: the wait, charged to what kept the awaited batch from being there earlier. Pure.

Where a batch was while it was awaited (``attribution.split_wait``) is not always what to change. A batch on its way
from its worker is held up by what that worker does meanwhile: a worker that runs the next batch's Python code holds the
GIL that its sending threads need, and a worker without a pause sets the rate, however its batches travel. So a journey
counts as ``transport`` only for what the batch's size explains; the rest belongs to the worker's work of that time, or,
when the worker was idle, to the ``latency`` of waking processes (1-3 ms a batch here), which no setting of a DataLoader
removes.
"""

from __future__ import annotations

import bisect

from .attribution import Task, TaskIndex, queued_behind
from .timeline import Step

#: What handing a batch over costs where it could not be measured (no workers yet): shared memory is written and faulted
#: in by the worker, mapped and unmapped by the trainer (facts/loaders 1: 24-26 ms and 3.5 ms for 36.8 MiB; 0.15 ms of
#: the trainer's CPU a tensor, and about as much of the worker's, which serves its descriptor).
SERIALISE_NS_PER_BYTE, DESERIALISE_NS_PER_BYTE = 25e6 / 36.8 / 2**20, 3.5e6 / 36.8 / 2**20
NS_PER_TENSOR = 150_000.0
#: Tensors of an ordinary batch (data, target): their cost is part of the latency.
USUAL_TENSORS = 4

CHARGED = ("fetch", "collate", "transport", "pin", "latency", "unseen")


def charge(charged: dict[str, float], parts: dict[str, int], step: Step, task: Task | None, index: TaskIndex) -> None:
    """Adds one steady step's stall to ``charged``, by the stage that has to become faster.

    Args:
        charged: sums so far, keys ``CHARGED``; changed in place.
        parts: the step's wait by place.
        step: the step.
        task: its batch; None when the worker's side was not recorded.
        index: finds the other batches of its worker.
    """
    scale = step.stall_ns / step.wait_ns
    for place in ("fetch", "collate", "pin", "unseen"):
        charged[place] += parts[place] * scale
    if task is None:
        charged["latency"] += (parts["transport"] + parts["reorder"]) * scale
        return
    mine = index.by_worker.get(task.pid)
    if mine is None:  # in the trainer itself: before the fetch the sampler draws, after it nothing travels
        charged["fetch"] += parts["queued"] * scale
        charged["latency"] += (parts["transport"] + parts["reorder"]) * scale
        return
    if parts["queued"]:
        behind = queued_behind(step, task, mine)
        charged["latency"] += behind.pop("transport") * scale
        for place, ns in behind.items():
            charged[place] += ns * scale
    _charge_journey(charged, parts["transport"] + parts["reorder"], scale, step, task, mine)


def _charge_journey(
    charged: dict[str, float], journey_ns: int, scale: float, step: Step, task: Task, mine: list[Task]
) -> None:
    if journey_ns <= 0:
        return
    heavy = min(size_cost_ns(task), journey_ns)
    charged["transport"] += heavy * scale
    rest = journey_ns - heavy
    t0, t1 = max(step.wait0, task.fetch1), step.wait1
    fetch, collate = busy_ns(mine, t0, t1)
    span = max(t1 - t0, 1)
    charged["fetch"] += rest * fetch / span * scale
    charged["collate"] += rest * collate / span * scale
    charged["latency"] += rest * max(1.0 - (fetch + collate) / span, 0.0) * scale


def busy_ns(mine: list[Task], t0: int, t1: int) -> tuple[int, int]:
    """Time that a worker spent in fetch and in collate within ``t0..t1``."""
    fetch = collate = 0
    at = bisect.bisect_right(mine, t0, key=lambda task: task.fetch1)
    for other in mine[at:]:
        if other.fetch0 >= t1:
            break
        fetch += max(min(other.collate0, t1) - max(other.fetch0, t0), 0)
        collate += max(min(other.fetch1, t1) - max(other.collate0, t0), 0)
    return fetch, collate


def size_cost_ns(task: Task) -> float:
    """What many or huge tensors cost on their way, both sides."""
    tensors = max((task.num_tensors or 0) - USUAL_TENSORS, 0)
    return (task.num_bytes or 0) * (SERIALISE_NS_PER_BYTE + DESERIALISE_NS_PER_BYTE) + tensors * 2 * NS_PER_TENSOR
