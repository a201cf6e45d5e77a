"""The ring: the slots of one loader in the trainer, their memory, and the leases on them.

It outlives the workers: a loader without persistent workers gives its slots to those of the next pass. All methods are
called by the thread that holds the pool's lock, but leases die in any thread, which only adds to ``_freed``.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from typing import Any

from headrace.core.room import budget_bytes, room
from headrace.core.slots import SlotState, SlotTable
from headrace.core.units import size
from headrace.host.memfd import Segment
from headrace.host.memory_room import MemoryLimits
from headrace.loader.lease import Freed, SlotMapping
from headrace.loader.unpacking import Unpacker
from headrace.options import read_settings

#: Rings of this process, which share the room.
_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def default_budget_bytes(memory_limit: int | None) -> int:
    """What the slots of one more ring may take together, as the machine is now."""
    return budget_bytes(
        room(MemoryLimits().levels()),
        own_bytes=0,
        num_local_ranks=read_settings(os.environ).num_local_ranks,
        num_loaders=len(_rings) + 1,
        memory_limit_bytes=memory_limit,
    )


class Ring:
    """Slot table, mappings by slot number, and what turns a filled slot into the user's batch.

    Args:
        budget_bytes: What all slots may have together.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.table = SlotTable(budget_bytes, 1)
        self.mappings: dict[int, SlotMapping] = {}
        self._freed: deque[Freed] = deque()
        self._unpacker = Unpacker()
        self._has_warned = False
        #: Whether no pool may use it any more.
        self.is_closed = False
        #: Number of the next pass; tasks of a pass are numbered from this number times 2**32.
        self.next_pass = 0
        _rings.add(self)

    def drain(self) -> list[int]:
        """Take back the slots whose leases have died; the numbers of slots that have retired, already closed."""
        freed, table = self._freed, self.table
        while freed:
            slot_id, generation, is_reusable = freed.popleft()
            is_free = table.release(slot_id, generation) and table.state(slot_id) is SlotState.FREE
            if is_free and not is_reusable:  # beyond the budget it has retired already
                table.retire(slot_id)
        return self._close_retired()

    def _close_retired(self) -> list[int]:
        retired = self.table.take_retired()
        for slot_id in retired:
            self.mappings.pop(slot_id).close()
        return retired

    def adopt(self, slot_id: int, fd: int, size_bytes: int) -> None:
        """A worker has made a segment; it is this slot from now on."""
        self.mappings[slot_id] = SlotMapping(Segment.attach(fd, size_bytes), slot_id, self._freed)

    def deliver(self, slot_id: int | None, skeleton: bytes, leaves: bytes) -> Any:
        """The user's batch out of a filled slot."""
        if slot_id is None:
            return self._unpacker.unpack(skeleton, leaves, None)
        copy_all = self.table.must_copy(slot_id)
        if copy_all and not self._has_warned:
            self._warn()
        self.table.deliver(slot_id, 1)
        return self._unpacker.unpack(skeleton, leaves, self.mappings[slot_id], copy_all=copy_all)

    def _warn(self) -> None:
        self._has_warned = True
        table = self.table
        warnings.warn(
            f"headrace.Loader: {len(table.living())} slots of together {size(table.num_bytes)} are in use and "
            f"memory_limit is {size(table.budget_bytes)}: batches that are kept are copied from now on. "
            "Keep fewer batches, or raise memory_limit.",
            stacklevel=2,
        )

    def close(self) -> None:
        """Let go of all slots; memory that is leased lives until its leases die. Idempotent."""
        self.is_closed = True
        for mapping in self.mappings.values():
            mapping.close()
        self.mappings.clear()

    def close_in_child(self) -> None:
        """In a forked child: keep only the memory of batches that the child may see."""
        self.is_closed = True
        for mapping in self.mappings.values():
            if mapping.num_leases:
                mapping.segment.close_fd()
            else:
                mapping.close()


def close_rings_in_child() -> None:
    """In a forked child: let go of all slots of the trainer, or their memory would live as long as the child."""
    for ring in list(_rings):
        ring.close_in_child()


class Shelf:
    """Where a loader keeps the rings that no pool uses. Any thread."""

    def __init__(self) -> None:
        self._rings: list[Ring] = []
        self._is_closed = False

    def take(self) -> Ring | None:
        """A ring, if there is one. Those of a parent process are of no use."""
        while self._rings:
            ring = self._rings.pop()
            if not ring.is_closed:
                return ring
        return None

    def put(self, ring: Ring) -> None:
        """Give a ring back; it is closed where the loader is gone."""
        if self._is_closed:
            ring.close()
        else:
            self._rings.append(ring)

    def close(self) -> None:
        """The loader is gone: close the rings. Idempotent."""
        self._is_closed = True
        while (ring := self.take()) is not None:
            ring.close()
