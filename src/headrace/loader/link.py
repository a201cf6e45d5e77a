"""One worker as the trainer sees it: its socket, what it has mapped, and what could not be sent to it yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from headrace.core.schedule import Task as Planned
from headrace.core.schedule import TaskKind
from headrace.core.slots import Grant
from headrace.loader.channel import Channel
from headrace.loader.layouts import LayoutMemory
from headrace.loader.messages import FAILED_PART, Attached, Parts, Task, TaskExtras, no_extras
from headrace.loader.ring import Ring


@dataclass(frozen=True, slots=True)
class Granted:
    """A task that has a slot, or the right to make one.

    Attributes:
        planned: The task as the schedule has it.
        grant: What it may use.
        epoch: Number of the pass, for seeds by place.
        index: What the sampler gave for the batch.
    """

    planned: Planned
    grant: Grant
    epoch: int
    index: Any


@dataclass(slots=True)
class Link:
    """See the module. Used with the pool's lock held; nothing blocks.

    Attributes:
        number: The worker's number.
        channel: The trainer's end of its socket pair.
        handle: Its process.
        is_ready: Whether it has begun to take tasks.
        layouts: How its batches are laid out, as it numbers them.
    """

    number: int
    channel: Channel
    handle: Any
    is_ready: bool = False
    layouts: LayoutMemory = field(default_factory=LayoutMemory)
    #: Slots that it has mapped, or whose descriptors are on the way; of these, retired ones that it is to unmap.
    _known: set[int] = field(default_factory=set)
    _forget: list[int] = field(default_factory=list)
    #: What its socket had no room for.
    _backlog: deque[Any] = field(default_factory=deque)

    def send(self, item: Any, ring: Ring) -> None:
        """Send a ``Granted`` task or a message, behind what waits already."""
        if self._backlog or not self._try(item, ring):
            self._backlog.append(item)

    def flush(self, ring: Ring) -> None:
        """It has read something: send what waits."""
        while self._backlog and self._try(self._backlog[0], ring):
            self._backlog.popleft()

    def retire(self, slot_id: int) -> None:
        """A slot will not be used again: the worker is told with its next task."""
        if slot_id in self._known:
            self._known.discard(slot_id)
            self._forget.append(slot_id)

    def _try(self, item: Any, ring: Ring) -> bool:
        """Whether something went out; False when the worker's socket is full."""
        try:
            if isinstance(item, Granted):
                return self._send_task(item, ring)
            if isinstance(item, Parts):
                return self._send_parts(item, ring)
            return self.channel.send(item)
        except ConnectionError:
            return True  # it has died: what is sent to it is lost, and is sent again when the crew reports the death

    def _send_task(self, item: Granted, ring: Ring) -> bool:
        planned, grant, slot_id = item.planned, item.grant, item.grant.slot_id
        extras, fds = no_extras(), list[int]()
        new_id = slot_id if slot_id is not None and slot_id not in self._known else None
        if new_id is not None or self._forget:
            attached, fds = self._attach([] if new_id is None else [new_id], ring)
            extras = TaskExtras(attached, tuple(self._forget))
        task = Task(
            planned.id,
            item.epoch,
            planned.batch,
            planned.begin_row,
            planned.end_row,
            planned.kind is TaskKind.PART,
            slot_id,
            grant.min_new_bytes,
            grant.max_new_bytes,
            item.index,
            extras,
        )
        is_sent = self.channel.send(task, fds=fds)
        if is_sent and extras is not no_extras():
            self._forget.clear()
            self._known.update(slot.slot_id for slot in extras.attached)
        return is_sent

    def _send_parts(self, parts: Parts, ring: Ring) -> bool:
        used = [part.slot_id for part in parts.parts if part.slot_id is not None and part.slot_id != FAILED_PART]
        attached, fds = self._attach([slot_id for slot_id in used if slot_id not in self._known], ring)
        is_sent = self.channel.send(Parts(parts.task_id, parts.parts, attached), fds=fds)
        if is_sent:
            self._known.update(used)
        return is_sent

    def _attach(self, slot_ids: list[int], ring: Ring) -> tuple[tuple[Attached, ...], list[int]]:
        segments = [(slot_id, ring.mappings[slot_id].segment) for slot_id in slot_ids]
        attached = tuple(Attached(slot_id, segment.size_bytes) for slot_id, segment in segments)
        return attached, [segment.fd for _, segment in segments]
