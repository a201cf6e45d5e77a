"""One pass over the sampler through a pool: drawing indices, keeping results until their turn, delivering.

Called by ``next()`` with the pool's lock held. The order of DataLoader is kept in everything that can be seen: a pass
draws its first indices when it begins, and one more for each batch that it delivers, before it delivers it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.core.schedule import Schedule, TaskKind, Verdict
from headrace.core.schedule import Task as Planned
from headrace.errors import WorkerDiedError, WorkerTimeoutError
from headrace.loader.control import LIMIT, LIMIT_OF, NEXT, NEXT_OF
from headrace.loader.crew import DeadWorker
from headrace.loader.errors_remote import unpack_exception
from headrace.loader.messages import FAILED_PART, Answer, Kind, PartAt, Parts
from headrace.loader.pool import Pool
from headrace.loader.resume import PassStart

_OUR_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: The trainer waits so long for a batch that its worker has begun before others help.
STEAL_AFTER_MS = 50


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that has arrived.

    Attributes:
        slot_id: Where it lies; None where it needs no slot.
        leaves: Table of its tensors.
        skeleton: How it is nested.
    """

    slot_id: int | None
    leaves: bytes
    skeleton: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """In a batch's place: what making it raised in a worker, packed; or the text about its workers' deaths."""

    remote: bytes | None
    died: str | None


class Pass:
    """See the module.

    Args:
        pool: Whose workers make the batches.
        sampler: Gives the indices of one batch (of one sample, without automatic batching) at a time.
        prefetch: Batches ahead per worker.
        start: Number of the pass, for seeds by place, and where it begins.
        is_batched: Whether the sampler gives batches of indices.
        in_order: Deliver in the sampler's order.
        timeout_s: The longest wait for a batch; 0: none.
        can_steal: Whether the rows of a batch may be made by several workers.
        task_rows: Rows in each part of such a batch; None: even shares.
    """

    def __init__(
        self,
        pool: Pool,
        sampler: Iterator[Any],
        prefetch: int,
        *,
        start: PassStart,
        is_batched: bool,
        in_order: bool,
        timeout_s: float,
        can_steal: bool,
        task_rows: int | None,
    ) -> None:
        self.pool, self.start, self.epoch = pool, start, start.epoch
        self.number = pool.ring.next_pass
        pool.ring.next_pass += 1
        self.schedule = Schedule(
            pool.num_workers,
            prefetch,
            in_order=in_order,
            first_batch=start.first_batch,
            skip=start.skip,
            first_task=self.number << 32,
        )
        schedule = self.schedule
        start.progress = lambda: schedule.progress
        #: What the sampler gave for each batch that has not been delivered.
        self.indices: dict[int, Any] = {}
        #: Workers that are too many and have answered all.
        self.left_by: set[int] = set()
        self._most_workers = pool.num_workers
        self._sampler = sampler
        self._sampler_error: Exception | None = None
        self._is_batched, self._in_order, self._timeout_s = is_batched, in_order, timeout_s
        self._results: dict[int, Batch | Failure] = {}
        self._parts: dict[int, dict[int, Batch | Failure]] = {}
        #: Stolen batches whose owners wait, or will wait, for parts.
        self._stolen: set[int] = set()
        #: The batch that ``next`` waits for, and since when.
        self._waiting_for = (-1, 0)
        #: By batch: what is to be said when its owner answers that a part has failed.
        self._died: dict[int, str] = {}
        self._can_steal, self._task_rows = can_steal, task_rows
        pool.passes[self.number] = self
        pool.ring.table.set_budget(pool.ring.table.budget_bytes, pool.num_workers * prefetch)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Draw from the sampler and send tasks until enough is outstanding."""
        schedule = self.schedule
        while schedule.num_wanted:
            if not self.draw():
                return

    def draw(self) -> bool:
        """One batch more; False when the sampler has no more."""
        schedule = self.schedule
        try:
            index = next(self._sampler)
            num_rows = len(index) if self._is_batched else 1
        except StopIteration:
            schedule.finish()
            return False
        except Exception as error:  # noqa: BLE001 - a sampler is the user's code; the batches before it come first
            self._sampler_error = error
            schedule.finish()
            return False
        number = schedule.next_batch
        task = schedule.add(num_rows)
        if task is not None:
            self.indices[number] = index
            self.pool.outbox.submit(self, task)
        return True

    def resize(self, num_workers: int, prefetch: int) -> None:
        """Change the number of workers, which the pool has started, and the depth."""
        self._most_workers = max(self._most_workers, num_workers)
        self.left_by.difference_update(self.schedule.resize(num_workers, prefetch))
        self.fill()

    def knows(self, worker: int) -> bool:
        """Whether a worker with this number may have tasks of this pass."""
        return worker < self._most_workers and worker not in self.left_by

    # -- results ------------------------------------------------------------------------------------------------------

    def take(self, answer: Answer, slot_id: int | None, leaves: bytes, skeleton: bytes) -> bool:
        """An answer has come; whether its slot is kept."""
        schedule = self.schedule
        if answer.kind is Kind.EXHAUSTED:
            task = schedule.exhaust(answer.task_id)
            if task is not None:
                self.indices.pop(task.batch, None)
                self.fill()
            return False
        task = schedule.arrive(answer.task_id)
        if task is None:
            return False
        assert answer.kind is not Kind.SKIPPED
        is_batch = answer.kind is Kind.BATCH
        died = self._died.pop(task.batch, None) if task.kind is TaskKind.BATCH else None
        result = Batch(slot_id, leaves, skeleton) if is_batch else Failure(skeleton, died)
        if task.kind is TaskKind.PART:
            self._parts.setdefault(task.batch, {})[task.begin_row] = result
            self._send_parts(task.batch)
        else:
            self._results[task.batch] = result
            self._stolen.discard(task.batch)
            self._forget_parts(task.batch)
        return is_batch

    def condemn(self, task: Planned, verdict: Verdict, dead: DeadWorker) -> None:
        """A batch has killed too many workers: an error takes its place."""
        self.schedule.arrive(task.id)
        index = self.indices[task.batch]
        if verdict.row is not None and self._is_batched:
            what = f"the sample with index {index[verdict.row]!r} (row {verdict.row} of batch {task.batch})"
        else:
            what = f"batch {task.batch} (indices {index!r})"
        text = f"{dead.describe()} {verdict.num_kills} workers have died while they made {what}; it is given up."
        if task.kind is TaskKind.PART:  # the owner of the batch holds its other rows, and is told
            self._died[task.batch] = text
            self._parts.setdefault(task.batch, {})[task.begin_row] = Failure(b"", None)
            self._send_parts(task.batch)
        else:
            self._results[task.batch] = Failure(None, text)
            self._stolen.discard(task.batch)
            self._forget_parts(task.batch)

    def forget_results(self) -> list[int]:
        """The slots of batches that nobody will ask for."""
        results = [*self._results.values(), *(part for parts in self._parts.values() for part in parts.values())]
        slots = [result.slot_id for result in results if isinstance(result, Batch) and result.slot_id is not None]
        self._results.clear()
        self._parts.clear()
        return slots

    # -- stealing -----------------------------------------------------------------------------------------------------

    def _steal(self, batch: int) -> None:
        """Let others make the rows of an awaited batch that its worker has not begun, and of the one behind it."""
        schedule, pool = self.schedule, self.pool
        owner, task_id = schedule.owner(batch), schedule.task_of(batch)
        row = pool.row_of(owner, task_id)
        others = [worker for worker in range(schedule.num_workers) if worker != owner and worker in pool.links]
        if row is None or not others:
            return
        idle = [worker for worker in others if not schedule.queue(worker)]
        # The owner keeps its share: it goes on while the others come to the end of their samples.
        num_left = len(self.indices[batch]) - row - 1
        first_row = row + 1 + num_left // (len(others) + 1)
        if self._give_away(batch, first_row, others):
            pool.page.ring(owner, {LIMIT: first_row, LIMIT_OF: task_id + 1})
        # What waits behind a slow sample is late too; those who have nothing to do may as well make it.
        behind = batch + schedule.num_workers
        is_behind = idle and schedule.can_steal(behind) and schedule.owner(behind) == owner
        if is_behind and self._give_away(behind, 0, idle):
            pool.page.ring(owner, {NEXT: 0, NEXT_OF: schedule.task_of(behind) + 1})

    def _give_away(self, batch: int, first_row: int, helpers: list[int]) -> bool:
        """Send the rows of a batch from one on to others; whether there are any."""
        if self._task_rows is not None:
            num_parts = -(-(len(self.indices[batch]) - first_row) // self._task_rows)
            helpers = [helpers[part % len(helpers)] for part in range(num_parts)]
        tasks = self.schedule.steal(batch, first_row, helpers)
        for task in tasks:
            self.pool.outbox.submit(self, task, is_awaited=True)
            self.pool.page.ring(task.worker)
        if tasks:
            self._stolen.add(batch)
        return bool(tasks)

    def _send_parts(self, batch: int) -> None:
        """Send the owner of a stolen batch what others have made, when all is there."""
        schedule = self.schedule
        if schedule.parts_missing(batch):
            return
        parts = []
        for _, result in sorted(self._parts.get(batch, {}).items()):
            if isinstance(result, Batch):
                parts.append(PartAt(result.slot_id, result.skeleton, result.leaves))
            else:
                assert result.remote is not None
                parts.append(PartAt(FAILED_PART, result.remote, b""))
        owner = schedule.owner(batch)
        self._stolen.discard(batch)
        self.pool.tell(owner, Parts(schedule.task_of(batch), tuple(parts), ()))
        self.pool.page.ring(owner)

    def release_owners(self) -> None:
        """The pass is left: owners of stolen batches need not wait for parts."""
        schedule = self.schedule
        for batch in self._stolen:
            nothing = (PartAt(FAILED_PART, b"", b""),)
            self.pool.tell(schedule.owner(batch), Parts(schedule.task_of(batch), nothing, ()))

    def _forget_parts(self, batch: int) -> None:
        for part in self._parts.pop(batch, {}).values():
            if isinstance(part, Batch) and part.slot_id is not None:
                self.pool.ring.table.discard(part.slot_id)

    def resubmit(self, task: Planned) -> None:
        """Send a task that repeats one of a dead worker."""
        self.pool.outbox.submit(self, task)
        if task.kind is TaskKind.BATCH and task.batch in self._parts:
            self._stolen.add(task.batch)
            self._send_parts(task.batch)

    def awaits(self, task: Planned) -> bool:
        """Whether the trainer waits for this task."""
        return task.batch == self.schedule.awaited

    # -- delivering ---------------------------------------------------------------------------------------------------

    def next(self) -> Any:
        """The next batch; blocks until it is there.

        Raises:
            StopIteration: The pass is over.
            WorkerTimeoutError: It did not come in time.
            WorkerDiedError: A worker died, and its work is not repeated.
            Exception: What making the batch raised, or the sampler, in its turn.
        """
        schedule, pool = self.schedule, self.pool
        pool.drain()
        if not pool.is_replacing:
            pool.check_crew()  # DataLoader raises as soon as it can, too
        if len(pool.links) > pool.num_workers:
            pool.release()
        while (number := schedule.take()) is None:
            if schedule.is_over:
                self._end()
            awaited = schedule.awaited
            if awaited is None or not pool.receive(schedule.owner(awaited)):
                self._wait(awaited)
        result = self._results.pop(number)
        del self.indices[number]
        self.fill()
        if isinstance(result, Batch):
            return pool.ring.deliver(result.slot_id, result.skeleton, result.leaves)
        # No local variable may hold the exception: in a cycle with its traceback it would keep the workers alive.
        if result.died is not None:
            raise WorkerDiedError(result.died)
        assert result.remote is not None
        raise unpack_exception(result.remote)

    def _end(self) -> None:
        error, self._sampler_error = self._sampler_error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            del error  # or it would keep the workers alive, in a cycle with its traceback

    def _wait(self, awaited: int | None) -> None:
        """Sleep until something has come; get help for the awaited batch when that takes long."""
        pool, schedule = self.pool, self.schedule
        pool.outbox.push(self, awaited)
        left_ms = int(self._timeout_s * 1000) if self._timeout_s > 0 else None
        if awaited is not None and self._can_steal and schedule.can_steal(awaited):
            patience_ms = self._patience_ms(awaited)
            pause_ms = patience_ms if left_ms is None else min(patience_ms, left_ms)
            if pool.wait(pause_ms):
                return
            left_ms = None if left_ms is None else left_ms - pause_ms
            self._steal(awaited)
        if not pool.wait(left_ms):
            self._time_out(awaited)

    def _patience_ms(self, batch: int) -> int:
        """How much longer to wait for a batch before others help; other batches may arrive in the meantime."""
        now_ns = time.monotonic_ns()
        if self._waiting_for[0] != batch:
            self._waiting_for = batch, now_ns
        return max(STEAL_AFTER_MS - (now_ns - self._waiting_for[1]) // 1_000_000, 0)

    def _time_out(self, awaited: int | None) -> None:
        schedule = self.schedule
        text = f"DataLoader timed out after {self._timeout_s} seconds"
        batch = awaited if awaited is not None else min(self.indices)
        worker = schedule.owner(batch)
        row = self.pool.row_of(worker, schedule.task_of(batch))
        where = f"batch {batch} of worker {worker} (pid {self.pool.links[worker].handle.pid})"
        if row is not None and self._is_batched:
            where += f", which is at row {row}, index {self.indices[batch][row]!r}"
        stack = _users_frames(self.pool.stack_of(worker)) or "it gives no stack: it is stopped, or has not started yet"
        raise WorkerTimeoutError(f"{text}: {where}\n{stack}")


def _users_frames(stack: str) -> str:
    """A stack, the innermost frame first, without our frames that led to the user's."""
    lines = stack.splitlines()
    ours = (number for number, line in enumerate(lines) if _OUR_FILES in line)
    return "\n".join(lines[: next(ours, len(lines))])
