"""Leases: what keeps a slot from being written again while anything of its batch lives.

Each batch that is handed out in place gets one *owner*, a ctypes array over its slot. Every tensor and array of the
batch is made from the owner and keeps it alive, and so does every view of those (torch, numpy, memoryview). When the
last of them dies, in whatever thread or in the middle of a garbage collection, the owner dies and one entry is
appended to a deque, which needs no lock. The trainer drains the deque when it next needs a slot.

    unpack --> lease --> user's tensors ... views ... last one dies --> Freed in the deque --> slot is free

A forked child shares the memory: a batch that the trainer holds while it forks may be read by the child for ever, so
that its slot must never be written again. Its entry then says ``reusable=False``.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import Any, NamedTuple

from headrace.host.memfd import Segment


class Freed(NamedTuple):
    """A slot that nothing refers to any more.

    Attributes:
        slot_id: The number the mapping was made with.
        generation: How often the slot had been handed out; entries of older generations do not occur twice.
        reusable: False when a forked child may still read it: the slot must be retired.
    """

    slot_id: int
    generation: int
    reusable: bool = True


class _Lease(weakref.ref[Any]):
    """Fires once, when its owner dies."""

    __slots__ = ("freed", "generation", "reusable", "slot_id")
    freed: deque[Freed]
    slot_id: int
    generation: int
    reusable: bool


def _died(lease: Any, freed: type[Freed] = Freed) -> None:
    # No global names: a batch may outlive them when the interpreter ends.
    lease.freed.append(freed(lease.slot_id, lease.generation, lease.reusable))


class SlotMapping:
    """The trainer's view of one slot. Made and used by the trainer's thread; what it hands out may die anywhere.

    Attributes:
        segment: The slot's memory, closed by ``close()``.
        slot_id: The slot's number.
        generation: How often the slot was handed out.
    """

    __slots__ = ("__weakref__", "_freed", "_lease", "_owner_type", "generation", "segment", "slot_id")

    def __init__(self, segment: Segment, slot_id: int, freed: deque[Freed]) -> None:
        self.segment = segment
        self.slot_id = slot_id
        self.generation = 0
        self._freed = freed
        self._owner_type = type(segment.root)
        self._lease: _Lease | None = None
        _watch_forks(self)

    @property
    def num_leases(self) -> int:
        """1 while anything of the batch that was handed out last lives, otherwise 0."""
        return int(self._lease is not None and self._lease() is not None)

    def lease(self) -> Any:
        """Starts a generation and returns its owner: one entry of ``Freed`` is appended when the owner dies."""
        self.generation += 1
        owner = self._owner_type.from_buffer(self.segment.root)
        lease = _Lease(owner, _died)
        lease.freed, lease.slot_id, lease.generation, lease.reusable = self._freed, self.slot_id, self.generation, True
        self._lease = lease
        return owner

    def free(self) -> None:
        """Starts and ends a generation at once: everything was copied out."""
        self.generation += 1
        self._lease = None
        self._freed.append(Freed(self.slot_id, self.generation))

    def keep_after_fork(self) -> None:
        """Marks what is handed out now as shared with a child. The trainer calls it just before it forks."""
        if self._lease is not None:
            self._lease.reusable = False

    def close(self) -> None:
        """Lets go of the slot; its memory lives on as long as a lease does, whose end is then told to nobody."""
        self._lease = None
        self.segment.close()


_mappings: weakref.WeakSet[SlotMapping] = weakref.WeakSet()
_hooked = False


def _watch_forks(mapping: SlotMapping) -> None:
    global _hooked
    if not _hooked:  # when the first slot is mapped, and not when the module is imported
        _hooked = True
        os.register_at_fork(before=_before_fork)
    _mappings.add(mapping)


def _before_fork() -> None:
    # Also before the fork of a helper: its workers read what the dataset holds, a batch of the last pass perhaps.
    for mapping in list(_mappings):
        mapping.keep_after_fork()
