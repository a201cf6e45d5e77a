"""Tasks on their way to the workers: those that wait for a slot, and those that hold one until they are answered.

submit --a slot is granted--> running --answer--> settle
   |                             '--refused--> ask_again --> submit, or wait until the batch is awaited
   '--no slot, no budget--> unsent --retry, or push when the trainer waits for it--> running
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.core.layout import segment_bytes
from headrace.core.schedule import Task as Planned
from headrace.loader.link import Granted, Link
from headrace.loader.ring import Ring

if TYPE_CHECKING:
    from headrace.loader.passes import Pass


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A task that waits for a slot.

    Attributes:
        owner: Whose it is.
        planned: The task.
        need_bytes: What it is known to need; 0: nothing is known.
        is_hopeless: The machine has no room for it: it waits until the trainer waits for it.
    """

    owner: Pass
    planned: Planned
    need_bytes: int
    is_hopeless: bool = False


class Outbox:
    """See the picture of the module. Used with the pool's lock held; nothing blocks.

    Args:
        ring: The slots.
        links: The pool's workers by number, as they are at each moment.
    """

    def __init__(self, ring: Ring, links: dict[int, Link]) -> None:
        self._ring, self._links = ring, links
        self._unsent: deque[_Unsent] = deque()
        self._running: dict[int, tuple[Pass, Granted]] = {}

    def submit(self, owner: Pass, planned: Planned, need_bytes: int = 0, *, is_awaited: bool = False) -> None:
        """Send a task, now or as soon as there is a slot for it."""
        grant = None
        # None overtakes another of its worker: in a stream, and with draws by worker, their order is their contents.
        if is_awaited or not any(entry.planned.worker == planned.worker for entry in self._unsent):
            grant = self._ring.table.assign(planned.id, planned.worker, need_bytes, is_awaited=is_awaited)
        if grant is None:
            self._unsent.append(_Unsent(owner, planned, need_bytes))
            return
        granted = Granted(planned, grant, owner.epoch, owner.indices[planned.batch])
        self._running[planned.id] = owner, granted
        self._links[planned.worker].send(granted, self._ring)

    def retry(self) -> None:
        """Slots may have become free: send what waits for one, in its order."""
        if not self._unsent:
            return
        unsent, self._unsent = self._unsent, deque()
        for entry in unsent:
            if entry.is_hopeless:
                self._unsent.append(entry)
            else:
                self.submit(entry.owner, entry.planned, entry.need_bytes)

    def push(self, owner: Pass, batch: int | None) -> None:
        """The trainer is about to sleep for this batch: send its tasks even if the budget is used up.

        Where it waits for any batch (None), the oldest one is sent as soon as nothing of the pass is under way.
        """
        if not self._unsent:
            return
        mine = [entry for entry in self._unsent if entry.owner is owner]
        if batch is None:
            is_stalled = not any(running is owner for running, _ in self._running.values())
            awaited = mine[:1] if is_stalled else []
        else:
            awaited = [entry for entry in mine if entry.planned.batch == batch]
        for entry in awaited:
            self._unsent.remove(entry)
            self.submit(owner, entry.planned, entry.need_bytes, is_awaited=True)

    def settle(self, task_id: int) -> Granted:
        """A task was answered."""
        return self._running.pop(task_id)[1]

    def ask_again(self, owner: Pass, granted: Granted, need_bytes: int) -> None:
        """A worker has refused a task: the batch needs more than was granted, or than the machine has left."""
        planned, max_bytes = granted.planned, granted.grant.max_new_bytes
        is_awaited = owner.awaits(planned)
        if not is_awaited and max_bytes is not None and need_bytes <= segment_bytes(max_bytes, 0):
            # It would be refused again, as often as it were sent: the answer has to be there only when it is awaited.
            self._unsent.append(_Unsent(owner, planned, need_bytes, is_hopeless=True))
        else:
            self.submit(owner, planned, need_bytes, is_awaited=is_awaited)

    def withdraw(self, owner: Pass) -> None:
        """A pass was left: nothing more of it is sent."""
        self._unsent = deque(entry for entry in self._unsent if entry.owner is not owner)

    def lose(self, task_ids: Iterable[int]) -> None:
        """These tasks are replaced by others."""
        lost = set(task_ids)
        self._unsent = deque(entry for entry in self._unsent if entry.planned.id not in lost)

    def forget(self, worker: int | None) -> None:
        """A worker is gone (None: all are), and writes to no slot any more."""
        for task_id, (_, granted) in list(self._running.items()):
            if worker is None or granted.planned.worker == worker:
                del self._running[task_id]
                self._ring.table.abandon(task_id)
