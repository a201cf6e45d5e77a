"""The memory of a worker: the slots that it has mapped, and the segments that it makes when a batch fits into none."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.layout import segment_bytes
from headrace.core.room import refusal, room
from headrace.errors import MemoryLimitError
from headrace.host.memfd import Segment
from headrace.host.memory_room import MemoryLimits
from headrace.loader.messages import Attached, Task


class NoRoom(Exception):  # noqa: N818 - caught in the worker
    """A segment of so many bytes is more than the task may make."""

    def __init__(self, need_bytes: int) -> None:
        super().__init__(need_bytes)
        self.need_bytes = need_bytes


class Holdings:
    """See the module. Belongs to the worker's thread.

    Attributes:
        slots: Mapped slots by number.
    """

    def __init__(self) -> None:
        self.slots: dict[int, Segment] = {}
        self._limits = MemoryLimits()
        self._made: list[Segment] = []

    def attach(self, attached: Sequence[Attached], fds: Sequence[int]) -> None:
        """Map slots whose descriptors have come, and close these."""
        for slot, fd in zip(attached, fds, strict=True):
            segment = self.slots[slot.slot_id] = Segment.attach(fd, slot.size_bytes)
            segment.close_fd()

    def forget(self, slot_ids: Sequence[int]) -> None:
        """These slots have retired."""
        for slot_id in slot_ids:
            self.slots.pop(slot_id).close()

    def of(self, task: Task) -> Segment | None:
        """The slot that a task is to write to; None: it is to make one."""
        return None if task.slot_id is None else self.slots[task.slot_id]

    def begin(self) -> list[Segment]:
        """A task begins, perhaps between two samples of another one: what that has made, for ``end``."""
        outer, self._made = self._made, []
        return outer

    def end(self, outer: list[Segment]) -> None:
        """It was answered: the trainer has what was made for it, also by a try that was given up."""
        for segment in self._made:
            segment.close()
        self._made = outer

    def make(self, task: Task, num_bytes: int) -> Segment:
        """A new segment for a batch that does not fit into its slot, once it is sure that there is room.

        Raises:
            NoRoom: It is more than was granted; or than the machine has, and the trainer can do without it for now.
            MemoryLimitError: The machine has no room for it, and the trainer waits for this batch.
        """
        size_bytes = max(num_bytes, task.min_new_bytes)
        if task.max_new_bytes is not None and num_bytes > segment_bytes(task.max_new_bytes, 0):
            raise NoRoom(num_bytes)
        found = room(self._limits.levels())
        if refusal(size_bytes, found, "") is not None:
            size_bytes = num_bytes
        text = refusal(size_bytes, found, f"batch {task.batch}")
        if text is not None and task.max_new_bytes is not None:
            raise NoRoom(num_bytes)  # the trainer asks again when it waits for this batch
        if text is not None:
            raise MemoryLimitError(text)
        self._made.append(Segment.create(size_bytes))
        return self._made[-1]

    def close(self) -> None:
        """Let go of all slots."""
        for segment in self.slots.values():
            segment.close()
