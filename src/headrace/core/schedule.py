"""Which worker makes which batch, and when a batch may be delivered: one pass over a sampler.

Pure book-keeping in the trainer, under the pool's lock; nothing here blocks. The engine draws and moves messages:

    while schedule.num_wanted and (indices := next(sampler)):     task = schedule.add(len(indices)); send it
    a worker's answer came:                                       schedule.arrive(task_id)
    next():                                                       batch = schedule.take()
    a worker was reaped:                                          death = schedule.die(worker, ...); send death.tasks

    a batch:   add --> ISSUED --arrive--> DONE --take--> DELIVERED
                        ^    '--exhaust--> VOID (the worker's stream has ended: nothing to deliver)
                        '-- die: the same rows again, as a new task, on the replacement or (worker leaving) on another

A task is a whole batch or, after ``steal``, some rows of one. A worker runs its tasks in the order in which they were
sent, parts between two samples. Numbers of tasks are never used again, so that an answer which comes
after all was repeated is known by its number and ignored.

Batch *k* is on worker *k* mod *n* of the current numbering. ``resize`` holds from the next batch that is added: batches
that were issued stay where they are, a worker with a number beyond the new count gets no more and leaves when it has
answered all (``take_left``).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

#: A sample (or a batch, where the sample is not known) that has killed so many workers is reported.
KILLS_OF_ONE_SAMPLE = 2
#: So many workers dead over one batch, at whatever samples, are reported too: an OOM killer strikes at any row.
KILLS_OF_ONE_BATCH = 16


class TaskKind(enum.Enum):
    """A whole batch (or its rows before the part that others took), or such a part."""

    BATCH = "batch"
    PART = "part"


@dataclass(frozen=True, slots=True)
class Task:
    """What is sent to a worker.

    Attributes:
        id: Never used again.
        kind: See there.
        batch: Number of the batch in this pass, from 0.
        worker: To whom it goes.
        begin_row: The first row.
        end_row: One past the last row.
    """

    id: int
    kind: TaskKind
    batch: int
    worker: int
    begin_row: int
    end_row: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A batch that kills its workers.

    Attributes:
        batch: Its number.
        row: The row of the sample that was being made each time; None where that is not known or not the same.
        num_kills: How many workers have died over it.
    """

    batch: int
    row: int | None
    num_kills: int


@dataclass(frozen=True, slots=True)
class Death:
    """What follows from a worker's death.

    Attributes:
        tasks: To be sent now, each to its worker: exactly what was lost.
        lost_ids: The tasks that these repeat, in the same order; nobody will answer them.
        is_replaced: Whether a replacement with the same number must be started (False: the worker was leaving).
        verdict: Set when it would be wrong to try again; ``tasks`` then still lists what was lost.
    """

    tasks: list[Task]
    lost_ids: list[int]
    is_replaced: bool
    verdict: Verdict | None


@dataclass(slots=True)
class _Batch:
    worker: int
    num_rows: int
    task_id: int
    end_row: int
    is_done: bool = False
    is_void: bool = False
    parts: set[int] = field(default_factory=set)
    num_parts: int = 0


class Schedule:
    """One pass. Owned by the trainer; the caller holds the pool's lock.

    Args:
        num_workers: Workers 0 to n - 1.
        prefetch: Batches ahead per worker (torch's ``prefetch_factor``).
        in_order: Deliver in the sampler's order; otherwise in the order of arrival.
        first_batch: Number of the first batch that is added (resuming in mid-pass).
        skip: Batches after ``first_batch`` that were delivered before the state was saved (``in_order=False`` only).
        first_task: Number of the first task; a pool that serves several passes goes on counting.
    """

    def __init__(
        self,
        num_workers: int,
        prefetch: int,
        *,
        in_order: bool = True,
        first_batch: int = 0,
        skip: Iterable[int] = (),
        first_task: int = 0,
    ) -> None:
        self.num_workers, self.prefetch, self.in_order = num_workers, prefetch, in_order
        #: Number of the next task, for the ``first_task`` of the next pass.
        self.next_task = first_task
        #: Number of the batch that the next ``add`` makes.
        self.next_batch = first_batch
        #: Sampler exhausted.
        self.is_finished = False
        self._cursor = first_batch
        self._skip = set(skip)
        self._next_worker = first_batch % num_workers
        self._batches: dict[int, _Batch] = {}
        self._arrived: deque[int] = deque()
        self._tasks: dict[int, Task] = {}
        self._queues: dict[int, dict[int, None]] = {w: {} for w in range(num_workers)}
        self._ended: set[int] = set()
        self._num_void = 0
        self._kills: dict[tuple[int, int | None], int] = {}

    # -- drawing ------------------------------------------------------------------------------------------------------

    @property
    def num_outstanding(self) -> int:
        """Batches that were added and neither delivered nor void."""
        return len(self._batches) - self._num_void

    @property
    def num_wanted(self) -> int:
        """How many batches to draw and ``add`` now; 0 when the queue is full or nothing is left to draw."""
        if self.is_finished or not self._active():
            return 0
        room = self.num_workers * self.prefetch - self.num_outstanding
        if self.in_order or room <= 0:
            return max(room, 0)
        return min(room, sum(max(self._capacity() - len(self._queues[w]), 0) for w in self._active()))

    def add(self, num_rows: int) -> Task | None:
        """The next batch was drawn from the sampler.

        Returns:
            The task to send; None when this batch was delivered before the state was saved, so nothing is to be done.
        """
        batch, self.next_batch = self.next_batch, self.next_batch + 1
        if batch in self._skip:
            self._next_worker = (self._next_worker + 1) % self.num_workers
            self._advance()
            return None
        worker = self._choose()
        task = self._issue(TaskKind.BATCH, batch, worker, 0, num_rows)
        self._batches[batch] = _Batch(worker, num_rows, task.id, num_rows)
        return task

    def finish(self) -> None:
        """The sampler has nothing more."""
        self.is_finished = True

    def _active(self) -> list[int]:
        if not self._ended:
            return list(range(self.num_workers))
        return [w for w in range(self.num_workers) if w not in self._ended]

    def _capacity(self) -> int:
        return self.prefetch * self.num_workers // max(len(self._active()), 1)

    def _choose(self) -> int:
        """The next worker in turn; out of order, the next one that has room (as DataLoader chooses)."""
        assert self._active()
        fallback = None
        for step in range(self.num_workers):
            worker = (self._next_worker + step) % self.num_workers
            if worker in self._ended:
                continue
            if self.in_order or len(self._queues[worker]) < self._capacity():
                break
            fallback = worker if fallback is None else fallback
        else:
            assert fallback is not None
            worker = fallback
        self._next_worker = (worker + 1) % self.num_workers
        return worker

    def _issue(self, kind: TaskKind, batch: int, worker: int, begin_row: int, end_row: int) -> Task:
        task = Task(self.next_task, kind, batch, worker, begin_row, end_row)
        self.next_task += 1
        self._tasks[task.id] = task
        self._queues[worker][task.id] = None
        return task

    # -- answers ------------------------------------------------------------------------------------------------------

    def arrive(self, task_id: int) -> Task | None:
        """A task's answer has come (a batch, a part, or an exception).

        Returns:
            The task; None when nobody waits for this answer any more (ignore it, but give its slot back).
        """
        task = self._drop(task_id)
        if task is None:
            return None
        batch = self._batches[task.batch]
        if task.kind is TaskKind.PART:
            batch.parts.discard(task_id)
            return task
        batch.is_done = True
        if not self.in_order:
            self._arrived.append(task.batch)
        for part in batch.parts:
            self._drop(part)
        batch.parts.clear()
        return task

    def exhaust(self, task_id: int) -> Task | None:
        """A worker's stream has ended at this task: it makes nothing any more, nor do its later tasks.

        The tasks behind it stay in its queue: each is answered by ``exhaust`` too, or dropped with ``void_worker``.
        """
        task = self._drop(task_id)
        if task is None:
            return None
        self._ended.add(task.worker)
        self._void(task.batch)
        return task

    def void_worker(self, worker: int) -> list[int]:
        """Drop all that an exhausted worker still has in its queue; the numbers of these tasks."""
        assert worker in self._ended
        ids = list(self._queues[worker])
        for task_id in ids:
            task = self._drop(task_id)
            assert task is not None
            self._void(task.batch)
        return ids

    def _void(self, batch: int) -> None:
        if self.in_order:
            self._batches[batch].is_void = True
            self._num_void += 1
        else:
            del self._batches[batch]
            self._skip.add(batch)
        self._advance()

    def _drop(self, task_id: int) -> Task | None:
        task = self._tasks.pop(task_id, None)
        if task is not None:
            del self._queues[task.worker][task_id]
        return task

    # -- delivery -----------------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> int | None:
        """The batch that ``next`` waits for; None when it would take any (or nothing is outstanding)."""
        return self._cursor if self.in_order and self._cursor in self._batches else None

    @property
    def is_over(self) -> bool:
        """Whether nothing is outstanding and nothing more can be added."""
        return not self._batches and (self.is_finished or not self._active())

    def take(self) -> int | None:
        """The batch to deliver now, which is delivered with this; None when it has to be waited for."""
        if self.in_order:
            batch = self._batches.get(self._cursor)
            if batch is None or not batch.is_done:
                return None
            number, self._cursor = self._cursor, self._cursor + 1
        else:
            if not self._arrived:
                return None
            number = self._arrived.popleft()
            self._skip.add(number)
        del self._batches[number]
        self._forget_kills(number)
        self._advance()
        return number

    def _advance(self) -> None:
        """Move the cursor over all that needs no waiting any more."""
        while self._cursor < self.next_batch:
            batch = self._batches.get(self._cursor)
            if batch is not None and batch.is_void:
                del self._batches[self._cursor]
                self._num_void -= 1
            elif self._cursor in self._skip:
                self._skip.discard(self._cursor)
            else:
                return
            self._cursor += 1

    @property
    def progress(self) -> tuple[int, tuple[int, ...]]:
        """The first batch that was not delivered, and those after it that were (none when in order)."""
        return self._cursor, tuple(sorted(number for number in self._skip if number > self._cursor))

    # -- deaths -------------------------------------------------------------------------------------------------------

    def die(self, worker: int, task_id: int | None = None, row: int | None = None) -> Death:
        """A worker has died, and all answers that it sent have been taken.

        Args:
            worker: Its number.
            task_id: The task that it had begun; None: it had begun none (nobody is blamed).
            row: The row of the batch that it was making; None where unknown (``__getitems__``, collate).
        """
        running = self._tasks.get(task_id) if task_id is not None else None
        verdict = self._blame(running.batch, row) if running is not None else None
        is_leaving = worker >= self.num_workers
        lost_ids = list(self._queues[worker])
        tasks = [self._repeat(task_id, is_leaving) for task_id in lost_ids]
        return Death(tasks, lost_ids, not is_leaving, verdict)

    def _repeat(self, task_id: int, is_leaving: bool) -> Task:
        lost = self._drop(task_id)
        assert lost is not None
        batch = self._batches[lost.batch]
        worker = self._heir(lost) if is_leaving else lost.worker
        end_row = batch.end_row if lost.kind is TaskKind.BATCH else lost.end_row
        task = self._issue(lost.kind, lost.batch, worker, lost.begin_row, end_row)
        if lost.kind is TaskKind.BATCH:
            batch.worker, batch.task_id = worker, task.id
        else:
            batch.parts.remove(task_id)
            batch.parts.add(task.id)
        return task

    def _heir(self, lost: Task) -> int:
        """Who does what a leaving worker has lost; a part goes to another than the batch's owner where there is one."""
        worker = lost.batch % self.num_workers
        if lost.kind is TaskKind.PART and worker == self._batches[lost.batch].worker:
            return (worker + 1) % self.num_workers
        return worker

    def _blame(self, batch: int, row: int | None) -> Verdict | None:
        key = (batch, row)
        self._kills[key] = self._kills.get(key, 0) + 1
        if self._kills[key] >= KILLS_OF_ONE_SAMPLE:
            return Verdict(batch, row, self._kills[key])
        total = sum(count for (number, _), count in self._kills.items() if number == batch)
        return Verdict(batch, None, total) if total >= KILLS_OF_ONE_BATCH else None

    def _forget_kills(self, batch: int) -> None:
        if self._kills:
            self._kills = {key: count for key, count in self._kills.items() if key[0] != batch}

    # -- stealing -----------------------------------------------------------------------------------------------------

    def owner(self, batch: int) -> int:
        """The worker that makes (and, after a steal, collates) an outstanding batch."""
        return self._batches[batch].worker

    def task_of(self, batch: int) -> int:
        """The number of the task that makes an outstanding batch."""
        return self._batches[batch].task_id

    def can_steal(self, batch: int) -> bool:
        """Whether a batch is outstanding, whole, and somebody else could help."""
        found = self._batches.get(batch)
        return found is not None and not (found.is_done or found.num_parts) and self.num_workers > 1

    def steal(self, batch: int, first_row: int, helpers: list[int]) -> list[Task]:
        """Give the rows from ``first_row`` on to other workers, in even runs.

        The owner goes on with the rows before and collates when all parts are there (``parts_missing``). An owner that
        had made all rows before it saw the limit answers with the whole batch; the parts are then forgotten.

        Returns:
            The tasks to send, in the order of their rows; empty when no row is left.
        """
        found = self._batches[batch]
        assert self.can_steal(batch)
        assert found.worker not in helpers
        num_rows = found.num_rows - first_row
        num_parts = min(len(helpers), num_rows)
        if num_parts <= 0:
            return []
        bounds = [first_row + num_rows * part // num_parts for part in range(num_parts + 1)]
        tasks = [
            self._issue(TaskKind.PART, batch, helpers[part], bounds[part], bounds[part + 1])
            for part in range(num_parts)
        ]
        found.parts, found.num_parts, found.end_row = {task.id for task in tasks}, num_parts, first_row
        return tasks

    def parts_missing(self, batch: int) -> int:
        """How many parts of a stolen batch have not arrived."""
        return len(self._batches[batch].parts)

    # -- the number of workers ----------------------------------------------------------------------------------------

    def resize(self, num_workers: int, prefetch: int) -> list[int]:
        """Change the number of workers and the depth, from the next batch that is added. Map-style datasets only.

        Returns:
            The numbers of workers to start now. Those that are too many leave by themselves, see ``take_left``.
        """
        assert num_workers > 0
        assert prefetch > 0
        assert not self._ended
        self.num_workers, self.prefetch = num_workers, prefetch
        self._next_worker = self.next_batch % num_workers
        added = [worker for worker in range(num_workers) if worker not in self._queues]
        self._queues.update({worker: {} for worker in added})
        return added

    def take_left(self) -> list[int]:
        """Workers that are too many and have answered all: stop them. Each is named once."""
        left = [worker for worker, queue in self._queues.items() if worker >= self.num_workers and not queue]
        for worker in left:
            del self._queues[worker]
        return left

    def queue(self, worker: int) -> list[int]:
        """The numbers of the tasks that a worker has not answered, the running one first."""
        return list(self._queues[worker])

    def tasks(self) -> list[Task]:
        """All tasks that have not been answered (when a pass is left, their slots are still written to)."""
        return list(self._tasks.values())
