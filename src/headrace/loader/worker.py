"""A worker: takes tasks from its socket, asks the dataset, packs the batch into a slot, answers.

    trainer --tasks--> [socket] --> worker: dataset, collate, slot --answers--> [socket] --> trainer

It blocks only in ``receive`` when there is nothing to do, and in ``send`` when the trainer has stopped reading. Between
two samples it looks at the bell in its control line (see ``control``): to end, to drop a batch that nobody wants any
more, to leave rows to others, or to make rows of another batch first that the trainer waits for.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, default_convert

from headrace.core.seeds import ROW_OF_BATCH
from headrace.host import children
from headrace.host.memfd import Segment
from headrace.loader.channel import Channel
from headrace.loader.control import (
    BELL,
    LIMIT,
    LIMIT_OF,
    NEXT,
    NEXT_OF,
    NUM_WORKERS,
    ROW,
    STALE,
    STOP,
    TASK,
    ControlPage,
)
from headrace.loader.errors_remote import Origin, pack_exception
from headrace.loader.fetching import Exhausted, GatherSource, RowSource, Source, StreamSource, WholeSource, source_of
from headrace.loader.holdings import Holdings, NoRoom
from headrace.loader.joining import Joiner, PartFailed, join
from headrace.loader.layouts import LayoutNumbers
from headrace.loader.messages import Answer, Begin, Kind, Parts, Ready, Resized, Stop, Task
from headrace.loader.packing import Packed, Packer, stack_on_the_heap
from headrace.loader.seeding import PlaceSeeder
from headrace.loader.setup import Identity, WorkerSetup


class _Abandoned(BaseException):
    """Nobody wants this batch any more."""


class _Stopped(BaseException):
    """The trainer has asked this worker to end."""


def run_worker(number: int, sock: socket.socket, page: ControlPage, setup: WorkerSetup, stack_fd: int) -> None:
    """The life of a worker; returns when it was told to stop, or when the trainer is gone."""
    if not setup.is_thread:
        children.dump_stack_on_signal(stack_fd)
        stack_on_the_heap()
    worker = Worker(number, Channel(sock, is_blocking=True), page, setup)
    try:
        worker.run()
    except (_Stopped, EOFError, ConnectionError):
        pass
    finally:
        worker.close()


class Worker:
    """See the picture of the module."""

    def __init__(self, number: int, channel: Channel, page: ControlPage, setup: WorkerSetup) -> None:
        self._number, self._channel, self._setup = number, channel, setup
        self._line = page.line(number)
        self._bell = self._line[BELL]
        self._identity = Identity(number, setup)
        self._waiting: deque[Any] = deque()
        self._holdings = Holdings()
        self._layouts = LayoutNumbers()
        self._task: Task | None = None
        self._packer = Packer(setup.collate_fn, self._make_segment)
        self._init_error: BaseException | None = None
        self._is_initialised = setup.init_fn is None
        self._seeder: PlaceSeeder | None = None
        #: torch's own collate functions draw nothing.
        self._collate_draws = setup.collate_fn not in (default_collate, default_convert)
        self._source: Source | None = None
        self._stream: StreamSource | None = None
        self._joiner = Joiner()
        #: Samples of tasks that were refused for want of room, and that cannot be made again.
        self._refused: dict[int, Any] = {}

    def run(self) -> None:
        """Until told to stop."""
        self._start()
        self._channel.send(Ready(os.getpid()))
        while True:
            self._handle(self._next())

    def close(self) -> None:
        """Let go of everything but the dataset."""
        self._identity.end()
        self._line.release()
        self._channel.close()
        self._holdings.close()

    # -- starting -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """What torch's worker does before its first task, in its order."""
        setup, identity = self._setup, self._identity
        generators = identity.begin(self._line[NUM_WORKERS])
        if setup.seeds == "place" and not setup.is_iterable:
            self._seeder = PlaceSeeder(setup.base_seed, generators, is_alone=True)
        try:
            if setup.init_fn is not None:
                setup.init_fn(self._number)
            self._is_initialised = True
            self._open_source()
        except Exception as error:  # noqa: BLE001 - the user's code; the first task is answered with it
            self._init_error = error

    def _open_source(self) -> None:
        setup, dataset = self._setup, self._identity.dataset
        if setup.is_iterable:
            self._stream = StreamSource(dataset, auto_collation=setup.auto_collation, drop_last=setup.drop_last)
        else:
            self._source = source_of(dataset, setup.collate_fn, auto_collation=setup.auto_collation)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _next(self) -> Any:
        if self._waiting:
            return self._waiting.popleft()
        return self._receive(blocking=True)

    def _receive(self, *, blocking: bool) -> Any:
        if not blocking:
            self._channel.sock.setblocking(False)
        try:
            received = self._channel.receive()
        finally:
            if not blocking:
                self._channel.sock.setblocking(True)
        if received is None:
            return None
        message, _, fds = received
        if isinstance(message, Task):
            self._joiner.open(message)
            self._holdings.attach(message.extras.attached, fds)
            self._holdings.forget(message.extras.forget)
        elif isinstance(message, Parts):
            self._holdings.attach(message.attached, fds)
        return message

    def _handle(self, message: Any) -> None:
        if isinstance(message, Task):
            self._do(message)
        elif isinstance(message, Parts):
            self._finish_parts(message)
        elif isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Resized):
            self._identity.set_info(message.num_workers)
        else:
            assert isinstance(message, Stop)
            raise _Stopped

    def _begin(self, message: Begin) -> None:
        """A new pass over an iterable dataset; what iter(dataset) raises is the answer to its first task."""
        self._refused.clear()
        if self._is_initialised:
            self._init_error = None  # the last stream could not be opened; this one may
        try:
            self._identity.apply_shared_seed(message.shared_seed)
            self._open_source()
        except Exception as error:  # noqa: BLE001 - the user's code
            self._init_error = error

    # -- a task -------------------------------------------------------------------------------------------------------

    def _do(self, task: Task) -> None:
        """Make one task and answer it."""
        stale = self._line[STALE]
        for task_id in [task_id for task_id in self._refused if task_id < stale]:
            del self._refused[task_id]
        if task.task_id < stale:
            self._answer(Answer(Kind.SKIPPED, task.task_id))
        else:
            self._answer_task(task, lambda: self._make(task))

    def _answer_task(self, task: Task, make: Callable[[], Packed | None]) -> None:
        began_ns = time.perf_counter_ns()
        self._line[ROW] = 0
        self._line[TASK] = task.task_id + 1
        outer, self._task = self._task, task
        outer_made = self._holdings.begin()
        try:
            packed = make()
            if packed is not None:
                self._answer_packed(task, packed, began_ns)
        except Exhausted:
            self._answer(Answer(Kind.EXHAUSTED, task.task_id))
        except NoRoom as error:
            self._answer(Answer(Kind.REFUSED, task.task_id, used_bytes=error.need_bytes))
        except _Abandoned:
            self._answer(Answer(Kind.SKIPPED, task.task_id))
        except PartFailed as error:
            self._answer(Answer(Kind.FAILED, task.task_id), error.args[0])
        except Exception as error:  # noqa: BLE001 - the boundary to the user's code
            self._answer(Answer(Kind.FAILED, task.task_id), self._pack_error(error, task))
        finally:
            self._task = outer
            self._holdings.end(outer_made)
        # Not where something else ends this worker, sys.exit() in the dataset: the trainer is to see what it was at.
        self._line[ROW] = 0
        self._line[TASK] = 0 if outer is None else outer.task_id + 1

    def _make(self, task: Task) -> Packed | None:
        """The batch, packed; None when rows of it are still missing."""
        if self._init_error is not None:
            raise self._init_error
        segment = self._holdings.of(task)
        if task.task_id in self._refused:
            return self._pack(task, self._refused.pop(task.task_id), segment, is_kept=True)
        source, seeder = self._source, self._seeder
        if isinstance(source, GatherSource):
            return self._packer.pack(source.fetch(task.index), segment, collate=False)
        if source is None:
            assert self._stream is not None
            return self._pack(task, self._stream.fetch(task.index), segment, is_kept=True)
        rest = source  # of a type that the function below sees

        def make() -> Packed | list[Any]:
            if isinstance(rest, RowSource):
                return self._make_rows(rest, task, segment)
            return self._make_whole(rest, task, segment)

        made = make() if seeder is None else seeder.run(task.epoch, task.batch, make)
        return self._await_parts(task, made) if isinstance(made, list) else made

    def _make_whole(self, source: WholeSource, task: Task, segment: Segment | None) -> Packed:
        if self._seeder is not None and self._seeder.seeds_samples:
            self._seeder.sample(ROW_OF_BATCH)
        return self._collate(task, source.fetch(task.index), segment)

    def _make_rows(self, source: RowSource, task: Task, segment: Segment | None) -> Packed | list[Any]:
        if task.is_part:
            return self._packer.pack(self._rows(source, task), segment, collate=False)
        probe = source.probe
        probe.begin()
        samples = self._rows(source, task)
        if probe.is_probing and probe.end():
            samples = self._rows(source, task)
        if len(samples) < len(task.index):
            return samples  # the other rows come from others; what was drawn so far is looked at first
        self._line[ROW] = 0
        return self._collate(task, samples, segment)

    def _await_parts(self, task: Task, samples: list[Any]) -> Packed | None:
        """Our rows of a stolen batch are made: collate if the others are here, or else when they come."""
        parts = self._joiner.add_own(task, samples)
        return None if parts is None else self._pack_joined(task, samples, parts)

    def _collate(self, task: Task, samples: Any, segment: Segment | None) -> Packed:
        if self._seeder is not None and self._collate_draws:
            self._seeder.collate()
        # Without places the next try would draw again, from generators that have gone on.
        return self._pack(task, samples, segment, is_kept=self._seeder is None)

    def _pack(self, task: Task, samples: Any, segment: Segment | None, *, is_kept: bool) -> Packed:
        """Collate and pack; samples that cannot be made again are kept for a second try where there is no room yet."""
        try:
            return self._packer.pack(samples, segment)
        except NoRoom:
            if is_kept:
                self._refused[task.task_id] = samples
            raise

    def _rows(self, source: RowSource, task: Task) -> list[Any]:
        """The samples of a task, with a look at the bell between two."""
        samples: list[Any] = []
        # Others may have rows of it already: it has waited, or these rows are made for the second time.
        begin, end, seeder = task.begin_row, self._limit(task, task.end_row), self._seeder
        while begin + len(samples) < end:
            look = seeder.look if seeder is not None else None
            seed = seeder.sample if seeder is not None and seeder.seeds_samples else None
            source.rows(samples, task.index, begin + len(samples), end, self._line, self._bell, seed, look)
            if self._line[BELL] != self._bell:
                end = self._attend(task, end)
        del samples[max(end - begin, 0) :]
        return samples

    def _attend(self, task: Task, end: int) -> int:
        """The bell has rung: what is to be done between two samples of a task; the new end of its rows."""
        line = self._line
        self._bell = line[BELL]
        if line[STOP]:
            raise _Stopped
        if task.task_id < line[STALE]:
            raise _Abandoned
        self._do_urgent()
        return self._limit(task, end)

    def _limit(self, task: Task, end: int) -> int:
        """The end of the rows of a task that are ours; rows from there on are made by others."""
        line = self._line
        for of, limit in ((LIMIT_OF, LIMIT), (NEXT_OF, NEXT)):
            if line[of] == task.task_id + 1:
                end = min(end, line[limit])
        return end

    def _do_urgent(self) -> None:
        """Read all that waits in the socket; do the parts of awaited batches at once, keep the rest in its order."""
        while (message := self._receive(blocking=False)) is not None:
            is_urgent = isinstance(message, Parts) or (isinstance(message, Task) and message.is_part)
            if is_urgent:
                self._handle(message)
            else:
                self._waiting.append(message)

    def _finish_parts(self, parts: Parts) -> None:
        """The other rows of a batch of ours are made; collate if our own are."""
        own = self._joiner.add_parts(parts)
        if own is None:
            return
        task, samples = own
        self._answer_task(task, lambda: self._pack_joined(task, samples, parts))

    def _pack_joined(self, task: Task, samples: list[Any], parts: Parts) -> Packed:
        joined = join(samples, parts, self._holdings.slots)  # the parts come once, and lie there until we answer
        return self._pack(task, joined, self._holdings.of(task), is_kept=True)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, answer: Answer, body: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        self._joiner.close(answer.task_id)
        self._channel.send(answer, body, fds)

    def _answer_packed(self, task: Task, packed: Packed, began_ns: int) -> None:
        number, body = self._layouts.number(packed.leaves, packed.skeleton)
        answer = Answer(
            Kind.BATCH,
            task.task_id,
            layout_no=number,
            used_bytes=packed.used_bytes,
            new_bytes=packed.segment.size_bytes if packed.is_new and packed.segment is not None else 0,
            num_leaf_bytes=len(packed.leaves),
            busy_ns=time.perf_counter_ns() - began_ns,
        )
        # The trainer keeps a new segment, gives it a number, and sends it when it is to be used again.
        fds = (packed.segment.fd,) if packed.is_new and packed.segment is not None else ()
        try:
            self._answer(answer, body, fds)
        except OSError:  # no descriptor is left: the trainer does not know this layout
            self._layouts = LayoutNumbers()
            raise

    def _pack_error(self, error: Exception, task: Task) -> bytes:
        row = self._line[ROW] - 1
        if self._stream is not None:
            indices: tuple[Any, ...] = ()
        elif not self._setup.auto_collation:
            indices, row = (task.index,), 0
        else:
            indices = (task.index[row],) if row >= 0 else tuple(task.index)
        return pack_exception(error, Origin(self._number, task.batch, row if row >= 0 else None, indices))

    def _make_segment(self, num_bytes: int) -> Segment:
        """Called by the packer when a batch does not fit into its slot."""
        assert self._task is not None
        return self._holdings.make(self._task, num_bytes)


def refuse_tasks(number: int, sock: socket.socket, error: Exception) -> None:
    """Answer every task with what kept this worker from starting; returns when the trainer is gone or says so."""
    channel = Channel(sock, is_blocking=True)
    try:
        channel.send(Ready(os.getpid()))
        while True:
            received = channel.receive()
            assert received is not None
            if isinstance(received[0], Stop):
                return
            if isinstance(received[0], Task):
                task = received[0]
                channel.send(Answer(Kind.FAILED, task.task_id), pack_exception(error, Origin(number)))
    except (EOFError, ConnectionError):
        return
