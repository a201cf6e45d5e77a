"""Stolen batches in the worker that owns them: its own rows and those that others have made, until both are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from headrace.host.memfd import Segment
from headrace.loader.lease import SlotMapping
from headrace.loader.messages import FAILED_PART, Parts, Task
from headrace.loader.unpacking import Unpacker


class PartFailed(Exception):  # noqa: N818 - caught in the worker
    """Another worker failed at its part of a batch; holds the packed exception."""


class Joiner:
    """What a worker keeps of its stolen batches, by its own task. Belongs to the worker's thread."""

    def __init__(self) -> None:
        #: Received and not answered; parts of other batches come too late, and nobody would ask for them.
        self._open: set[int] = set()
        self._own_rows: dict[int, tuple[Task, list[Any]]] = {}
        self._parts: dict[int, Parts] = {}

    def open(self, task: Task) -> None:
        """A task was received."""
        if not task.is_part:
            self._open.add(task.task_id)

    def close(self, task_id: int) -> None:
        """A task was answered."""
        self._open.discard(task_id)
        self._parts.pop(task_id, None)

    def add_own(self, task: Task, samples: list[Any]) -> Parts | None:
        """Our rows are made: the parts of the others, or None where they are still to come."""
        parts = self._parts.pop(task.task_id, None)
        if parts is None:
            self._own_rows[task.task_id] = task, samples
        return parts

    def add_parts(self, parts: Parts) -> tuple[Task, list[Any]] | None:
        """The parts of the others are made: our task and rows, or None where they are still to come."""
        own = self._own_rows.pop(parts.task_id, None)
        if own is None and parts.task_id in self._open:
            self._parts[parts.task_id] = parts
        return own


def join(samples: list[Any], parts: Parts, slots: Mapping[int, Segment]) -> list[Any]:
    """All samples of a stolen batch; those of others are views of their slots.

    Raises:
        PartFailed: One of them could not be made.
    """
    unpacker = Unpacker()
    for part in parts.parts:
        if part.slot_id == FAILED_PART:
            raise PartFailed(part.skeleton)
        mapping = None
        if part.slot_id is not None:
            mapping = SlotMapping(slots[part.slot_id], part.slot_id, deque())
        samples += unpacker.unpack(part.skeleton, part.leaves, mapping)
    return samples
