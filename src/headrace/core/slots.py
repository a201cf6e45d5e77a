"""Which slot is used by whom: the trainer's table of all slots of one pool, and their budget in bytes.

Pure book-keeping in the trainer, under the pool's lock; nothing here blocks or touches memory. The engine does what the
table says: it names the slot in the task, maps a new one, closes the retired ones (``take_retired``).

    (new) --fill--.                .------------- lend ------------> LENT: a worker reads the part and collates it
                  v                |                                  |
    FREE --assign--> ASSIGNED --fill--> READY --deliver--> LEASED     | fill or abandon of the task it was lent to
     ^  ^               |                 |                   |       v
     |  '--- abandon ---+---- refuse -----+---- discard ------+----> FREE
     '------------- release (the last lease died), or deliver without leases

    ASSIGNED --fill with a bigger segment--> RETIRED     FREE --over the budget, or trimmed--> RETIRED (for good)

A slot has one task or leases or neither, never two. Numbers of slots are never used again; each delivery of a slot has
a generation of its own, so a late report of an old lease changes nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class SlotState(enum.Enum):
    """See the diagram above."""

    FREE = "free"
    ASSIGNED = "assigned"
    READY = "ready"
    LENT = "lent"
    LEASED = "leased"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a task may use.

    Attributes:
        slot_id: The slot to write to; None: make a new one.
        min_new_bytes: A segment that is made, now or because the slot is too small, should have at least this size:
            the largest batch so far.
        max_new_bytes: The most that such a segment may have; None: only the machine's room counts.
    """

    slot_id: int | None
    min_new_bytes: int
    max_new_bytes: int | None


@dataclass(frozen=True, slots=True)
class Filled:
    """Where a task's result lies, and the outgrown slot that it took the place of."""

    slot_id: int
    retired_id: int | None


@dataclass(slots=True)
class _Slot:
    size_bytes: int
    state: SlotState
    worker: int
    task: int | None = None
    generation: int = 0


@dataclass(slots=True)
class _Use:
    """What a running task holds: a slot or not, bytes set aside for a new segment, slots lent to it."""

    worker: int
    slot_id: int | None
    reserved_bytes: int
    lent: list[int] = field(default_factory=list)


class SlotTable:
    """All slots of a pool. Owned by the trainer; the caller holds the pool's lock.

    Args:
        budget_bytes: What all living slots may have together. The task of the batch that the trainer waits for may go
            beyond it (``is_awaited``), or nothing would go on; the table shrinks again as soon as it can.
        num_tasks: How many tasks run at once when the queue is full (workers times prefetch); the budget is shared
            among so many while the size of a batch is not known.
    """

    def __init__(self, budget_bytes: int, num_tasks: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_tasks = num_tasks
        #: The largest batch so far, in bytes; 0 before the first.
        self.largest_bytes = 0
        #: Bytes of all living slots.
        self.num_bytes = 0
        self._reserved_bytes = 0
        self._slots: dict[int, _Slot] = {}
        self._uses: dict[int, _Use] = {}
        self._free: list[int] = []
        self._retired: list[int] = []
        self._next_id = 0

    # -- what is there ------------------------------------------------------------------------------------------------

    def state(self, slot_id: int) -> SlotState:
        """The state of a slot; one that does not live is RETIRED."""
        slot = self._slots.get(slot_id)
        return SlotState.RETIRED if slot is None else slot.state

    def size_bytes(self, slot_id: int) -> int:
        """Size of a living slot."""
        return self._slots[slot_id].size_bytes

    def generation(self, slot_id: int) -> int:
        """The generation that the next delivery of this slot gets; the lease is made with it."""
        return self._slots[slot_id].generation + 1

    def living(self) -> list[int]:
        """All slots that are not retired."""
        return list(self._slots)

    def count(self, state: SlotState) -> int:
        """How many living slots are in a state."""
        return sum(slot.state is state for slot in self._slots.values())

    @property
    def left_bytes(self) -> int:
        """What the budget leaves for new slots; negative when it is exceeded."""
        return self.budget_bytes - self.num_bytes - self._reserved_bytes

    # -- a task's way -------------------------------------------------------------------------------------------------

    def assign(self, task: int, worker: int, need_bytes: int = 0, *, is_awaited: bool = False) -> Grant | None:
        """Give a task a slot or the right to make one.

        Args:
            task: The number of the task, not used before.
            worker: Who runs it; a slot that this worker used last is preferred, for it is mapped there.
            need_bytes: What the task is known to need (after ``refuse``).
            is_awaited: The trainer waits for this task: it gets a slot even beyond the budget.

        Returns:
            None when there is neither a free slot nor budget: ask again after a delivery or a release.
        """
        assert task not in self._uses
        slot_id = self._pick_free(worker, need_bytes)
        if slot_id is None:
            return self._grant_new(task, worker, need_bytes, is_awaited)
        slot = self._slots[slot_id]
        slot.state, slot.task, slot.worker = SlotState.ASSIGNED, task, worker
        # All tasks together set aside at most half of what is left, so that growing never takes a kept batch's place.
        growth = min(max(self.left_bytes, 0) // max(2 * self.num_tasks, 1), slot.size_bytes)
        self._use(task, worker, slot_id, growth)
        limit = None if is_awaited else slot.size_bytes + growth
        return Grant(slot_id, self.largest_bytes, limit)

    def _pick_free(self, worker: int, need_bytes: int) -> int | None:
        """Take a free slot that is large enough: the worker's own one first, the one freed last first."""
        found = None
        for position in range(len(self._free) - 1, -1, -1):
            slot = self._slots[self._free[position]]
            if slot.size_bytes < need_bytes:
                continue
            if slot.worker == worker:
                return self._free.pop(position)
            found = position if found is None else found
        return None if found is None else self._free.pop(found)

    def _grant_new(self, task: int, worker: int, need_bytes: int, is_awaited: bool) -> Grant | None:
        wanted = max(need_bytes, self.largest_bytes)
        share = wanted or max(self.budget_bytes // max(self.num_tasks, 1), 1)
        # Free slots that are too small for what is needed make room for one that is not.
        too_small_bytes = sum(self._slots[slot_id].size_bytes for slot_id in self._free)
        if is_awaited or share <= self.left_bytes + too_small_bytes:
            self._shrink_for(share)
        if is_awaited:
            self._use(task, worker, None, min(share, max(self.left_bytes, 0)))
            return Grant(None, wanted, None)
        if share > self.left_bytes:
            return None
        self._use(task, worker, None, share)
        return Grant(None, wanted, share)

    def _use(self, task: int, worker: int, slot_id: int | None, reserved_bytes: int) -> None:
        self._uses[task] = _Use(worker, slot_id, reserved_bytes)
        self._reserved_bytes += reserved_bytes

    def fill(self, task: int, used_bytes: int, new_bytes: int | None = None) -> Filled:
        """A task's result has arrived in its slot, or in a new segment.

        Args:
            task: The task, which ends with this.
            used_bytes: What the batch takes.
            new_bytes: Size of the segment that the worker made; None: it used the slot that it was given.
        """
        use = self._end(task)
        self.largest_bytes = max(self.largest_bytes, used_bytes)
        if new_bytes is None:
            assert use.slot_id is not None
            self._slots[use.slot_id].state = SlotState.READY
            return Filled(use.slot_id, None)
        if use.slot_id is not None:
            self._retire(use.slot_id)
        slot_id = self._adopt(new_bytes, use.worker)
        self._shrink_for(0)
        return Filled(slot_id, use.slot_id)

    def _adopt(self, size_bytes: int, worker: int) -> int:
        slot_id, self._next_id = self._next_id, self._next_id + 1
        self._slots[slot_id] = _Slot(size_bytes, SlotState.READY, worker)
        self.num_bytes += size_bytes
        return slot_id

    def abandon(self, task: int) -> None:
        """A task has ended without a result in its slot: its worker died, it raised, or its batch came in the message.

        Only call it when nobody writes to the slot any more: the answer has come, or the worker has been reaped.
        """
        use = self._end(task)
        if use.slot_id is not None:
            self._set_free(use.slot_id)

    def refuse(self, task: int, need_bytes: int) -> None:
        """The worker says that the batch needs more than was granted. Assign again, with ``need_bytes``."""
        self.largest_bytes = max(self.largest_bytes, need_bytes)
        self.abandon(task)

    def _end(self, task: int) -> _Use:
        use = self._uses.pop(task)
        self._reserved_bytes -= use.reserved_bytes
        for lent in use.lent:
            self._set_free(lent)
        if use.slot_id is not None:
            self._slots[use.slot_id].task = None
        return use

    def lend(self, slot_id: int, task: int) -> None:
        """A finished part is handed to a running task, which reads it; it is free when that task ends."""
        slot = self._slots[slot_id]
        assert slot.state is SlotState.READY
        slot.state = SlotState.LENT
        self._uses[task].lent.append(slot_id)

    # -- a batch's way ------------------------------------------------------------------------------------------------

    def must_copy(self, slot_id: int) -> bool:
        """Whether a batch must be copied out at delivery, because leasing its slot would leave the next task none."""
        assert self._slots[slot_id].state is SlotState.READY
        return not self._free and self.left_bytes < max(self.largest_bytes, 1)

    def deliver(self, slot_id: int, num_leases: int) -> int:
        """A batch goes to the user, with so many leases on its slot (0: all was copied out, the slot is free).

        Returns:
            The generation that ``release`` must name.
        """
        slot = self._slots[slot_id]
        assert slot.state is SlotState.READY
        slot.generation += 1
        slot.state = SlotState.LEASED
        if num_leases == 0:
            self._set_free(slot_id)
        return slot.generation

    def discard(self, slot_id: int) -> None:
        """A batch that arrived is not wanted any more (the pass was left)."""
        assert self._slots[slot_id].state is SlotState.READY
        self._set_free(slot_id)

    def release(self, slot_id: int, generation: int) -> bool:
        """The last lease of a delivery has died.

        Returns:
            Whether the slot is free now; False for a report of an old generation or of a slot that is gone.
        """
        slot = self._slots.get(slot_id)
        if slot is None or slot.state is not SlotState.LEASED or slot.generation != generation:
            return False
        self._set_free(slot_id)
        return True

    def retire(self, slot_id: int) -> None:
        """A free slot must not be used again (a forked child may read it for ever)."""
        assert self._slots[slot_id].state is SlotState.FREE
        self._retire(slot_id)

    # -- size ---------------------------------------------------------------------------------------------------------

    def set_budget(self, budget_bytes: int, num_tasks: int) -> None:
        """Change the budget and the number of tasks; free slots beyond it retire, others when they are freed."""
        self.budget_bytes, self.num_tasks = budget_bytes, num_tasks
        self._shrink_for(0)

    def trim(self, num_keep: int) -> None:
        """Retire free slots until so many slots live, or none is free: what the user kept and gave back goes."""
        while self._free and len(self._slots) > num_keep:
            self._retire(self._free[0])

    def take_retired(self) -> list[int]:
        """Slots that have retired since the last call: unmap and close them, and tell the workers to do so."""
        retired, self._retired = self._retired, []
        return retired

    def _shrink_for(self, wanted_bytes: int) -> None:
        """Retire free slots, the one freed first first, as far as that makes room for so many bytes."""
        while self._free and self.left_bytes < wanted_bytes:
            self._retire(self._free[0])

    def _set_free(self, slot_id: int) -> None:
        slot = self._slots[slot_id]
        slot.state, slot.task = SlotState.FREE, None
        self._free.append(slot_id)
        if self.left_bytes < 0:
            self._shrink_for(0)

    def _retire(self, slot_id: int) -> None:
        slot = self._slots.pop(slot_id)
        if slot.state is SlotState.FREE:
            self._free.remove(slot_id)
        slot.state = SlotState.RETIRED
        self.num_bytes -= slot.size_bytes
        self._retired.append(slot_id)
