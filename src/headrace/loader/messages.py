"""What trainer, helper and workers say to each other, and how it lies in one datagram.

    trainer --Task, Parts, Begin, Stop, Resized--> worker      one socket pair per worker; messages come whole
    worker  --Ready, Answer--> trainer
    trainer --Start, Vouch, Leave, Quit--> helper              one socket pair per helper
    helper  --Started, Died--> trainer

How they lie in a datagram is in ``channel``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Kind(enum.IntEnum):
    """The first byte of every message; all but tasks and answers are ``OTHER``, a pickled object."""

    OTHER = 0
    TASK = 1
    BATCH = 2
    FAILED = 3
    EXHAUSTED = 4
    SKIPPED = 5
    REFUSED = 6


@dataclass(frozen=True, slots=True)
class Attached:
    """A slot that the receiver does not know yet; its descriptor comes with the message."""

    slot_id: int
    size_bytes: int


#: In the place of a part's slot: making it failed, and its skeleton is the exception.
FAILED_PART = -1


@dataclass(frozen=True, slots=True)
class PartAt:
    """Where samples that another worker has made lie, and how they are packed; None: they need no slot."""

    slot_id: int | None
    skeleton: bytes
    leaves: bytes


@dataclass(frozen=True, slots=True)
class TaskExtras:
    """What only some tasks carry.

    Attributes:
        attached: Slots whose descriptors come with this message.
        forget: Slots that have retired: unmap them.
    """

    attached: tuple[Attached, ...] = ()
    forget: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """Trainer to worker: make these rows.

    Attributes:
        task_id: Number of the task; its answer names it.
        epoch: Which pass of this base seed it is, from 0.
        batch: Number of the batch in its pass.
        begin_row: First row to make.
        end_row: One past the last.
        is_part: Answer with the samples as they are; otherwise collate.
        slot_id: Where to write; None: make a new segment.
        min_new_bytes: The least size of a segment that is made.
        max_new_bytes: The most that it may have; None: only the machine's room counts.
        index: What the sampler gave for the whole batch.
        extras: See there.
    """

    task_id: int
    epoch: int
    batch: int
    begin_row: int
    end_row: int
    is_part: bool
    slot_id: int | None
    min_new_bytes: int
    max_new_bytes: int | None
    index: Any
    extras: TaskExtras


@dataclass(frozen=True, slots=True)
class Parts:
    """Trainer to the owner of a stolen batch: the samples of the other rows, in their order.

    Attributes:
        task_id: The owner's task.
        parts: Where they lie.
        attached: Slots among them whose descriptors come with this message.
    """

    task_id: int
    parts: tuple[PartAt, ...]
    attached: tuple[Attached, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Trainer to worker: a new pass over an iterable dataset begins; what comes after this message belongs to it."""

    shared_seed: int | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Trainer to worker: end, with exit status 0."""


@dataclass(frozen=True, slots=True)
class Resized:
    """Trainer to worker: how many workers there are now, for ``get_worker_info()``."""

    num_workers: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker to trainer, once: it has begun to take tasks."""

    pid: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Worker to trainer: what became of a task.

    Attributes:
        kind: BATCH; FAILED (the body is the exception); EXHAUSTED (the stream has ended); SKIPPED (not wanted any
            more); REFUSED (no room for a segment of ``used_bytes``).
        task_id: The task.
        layout_no: Number under which both sides keep skeleton and leaves (the body); 0: they are not kept.
        used_bytes: What the batch takes in its slot (0: no slot); for REFUSED, what it needs.
        new_bytes: Size of the segment that comes with the message; 0: the batch lies in the slot that was named.
        num_leaf_bytes: How much of the body the table of leaves takes; the skeleton follows.
        busy_ns: Time the worker spent on the task.
    """

    kind: Kind
    task_id: int
    layout_no: int = 0
    used_bytes: int = 0
    new_bytes: int = 0
    num_leaf_bytes: int = 0
    busy_ns: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Trainer to helper: fork a worker with this number; its end of the socket pair comes with the message."""

    worker: int


@dataclass(frozen=True, slots=True)
class Vouch:
    """Trainer to helper: this process has got ready; replace it without asking should it die."""

    pid: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Trainer to helper: this process was told to stop, or ended on purpose; do not replace it."""

    pid: int


@dataclass(frozen=True, slots=True)
class Quit:
    """Trainer to helper: no more replacements; end the workers after their grace, then end."""


@dataclass(frozen=True, slots=True)
class Started:
    """Helper to trainer: a worker runs."""

    worker: int
    pid: int


@dataclass(frozen=True, slots=True)
class Died:
    """Helper to trainer: a worker was reaped.

    Attributes:
        worker: Its number.
        pid: Its process.
        code: How it ended, as ``multiprocessing`` gives it.
        new_pid: The process of its replacement, whose socket comes with the message; 0: there is none.
    """

    worker: int
    pid: int
    code: int
    new_pid: int


_NO_EXTRAS = TaskExtras()


def no_extras() -> TaskExtras:
    """What most tasks carry; known by its identity, so that nothing is sent for it."""
    return _NO_EXTRAS
