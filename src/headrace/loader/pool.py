"""The pool: workers, their sockets and the slots, driven by whichever thread of the trainer calls ``next()``.

    next() --Pass--> pool --task--> worker            no thread of ours: the trainer's own thread sends a task for each
                      ^   <--answer-- worker           batch that it takes, and sleeps in one poll when it has to wait
                      '-- crew: deaths, replacements

A pool serves one pass after another, or several at a time over one map-style dataset; answers find their pass by the
upper half of their task's number. One lock, which workers never see, is held by ``next()``; what runs in finalizers
(leases, passes that are dropped) only appends to deques, which the next holder of the lock empties.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.errors import LoaderError, WorkerDiedError
from headrace.host import children
from headrace.loader import messages
from headrace.loader.channel import Channel
from headrace.loader.control import NUM_WORKERS, ROW, STALE, STOP, TASK, ControlPage
from headrace.loader.crew import Crew, DeadWorker
from headrace.loader.link import Link
from headrace.loader.messages import Answer, Kind, Ready
from headrace.loader.outbox import Outbox
from headrace.loader.ring import Ring
from headrace.loader.threads import ThreadHandle
from headrace.loader.watch import Watch

if TYPE_CHECKING:
    from headrace.loader.passes import Pass

#: A worker that dies so often before it is ready is not started again.
MAX_FAILED_STARTS = 2
#: Nor is one that has died so often since its last answer, at whatever.
MAX_DEATHS_IN_A_ROW = 20
#: How long a worker that is asked for its stack may take.
_STACK_LIMIT_MS = 500
_PASS_SHIFT = 32
#: What an iterator says whose workers are gone.
SHUT_DOWN = "the workers of this iterator were shut down; iterate over the loader again"


class Pool:
    """See the picture of the module.

    Args:
        crew: Starts and ends the processes.
        page: The control page, owned by the pool.
        stack_fds: Both ends of the pipe to which a worker writes its stack when it is asked to; owned by the pool.
        ring: The slots, which outlive the pool.
        num_workers: How many to start.
        is_replacing: Whether a dead worker's tasks are done again (``on_worker_death="restart"``, map-style).
        is_stale_dropped: Whether workers drop what belongs to a pass that was left. Not where their draws depend on
            what they have made before, so that a replacement draws otherwise, too.
        on_close: Called once with the ring when the pool has ended.
    """

    def __init__(
        self,
        crew: Crew,
        page: ControlPage,
        stack_fds: tuple[int, int],
        ring: Ring,
        num_workers: int,
        *,
        is_replacing: bool,
        is_stale_dropped: bool,
        on_close: Callable[[Ring], None],
    ) -> None:
        self.lock = threading.Lock()
        self.crew, self.page, self.ring = crew, page, ring
        self.is_replacing, self.is_stale_dropped, self._on_close = is_replacing, is_stale_dropped, on_close
        self._stack_fds = stack_fds
        self.links: dict[int, Link] = {}
        self.num_workers = num_workers
        self.is_closed = False
        #: Whether it cannot go on: a worker has died and its work is not repeated.
        self.is_broken = False
        #: Whether Ctrl-C has cut ``next()`` short, so that a message may have been lost.
        self.was_interrupted = False
        self.passes: dict[int, Pass] = {}
        #: The next pass, where it has begun before the last one ended.
        self.early: Pass | None = None
        #: Numbers of passes that were dropped; filled by finalizers.
        self.left: deque[int] = deque()
        self.outbox = Outbox(ring, self.links)
        #: By worker: deaths before it was ready, and deaths since its last answer.
        self._failed_starts: dict[int, int] = {}
        self._deaths: dict[int, int] = {}
        self._owner_pid = os.getpid()
        self._watch = Watch()
        self._has_warned = False
        try:
            for number in range(num_workers):
                self.start(number)
            self._watch.follow_crew(crew.fds())
        except BaseException:
            self.close()
            raise

    # -- workers ------------------------------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        """Start a worker with this number. Does not wait until it runs."""
        self.page.reset(number)
        self.page.ring(number, {NUM_WORKERS: self.num_workers})
        channel, handle = self.crew.start(number)
        self._adopt(number, channel, handle)

    def _adopt(self, number: int, channel: Channel, handle: Any) -> None:
        link = Link(number, channel, handle)
        self.links[number] = link
        self._watch.add(link)

    def resize(self, num_workers: int) -> None:
        """Start what is missing, and tell all; those that are too many leave when they have answered all."""
        self.num_workers = num_workers
        for number in range(num_workers):
            if number not in self.links:
                self.start(number)
        for number in range(num_workers):
            self.page.ring(number, {NUM_WORKERS: num_workers})
            self.tell(number, messages.Resized(num_workers))
        self._watch.follow_crew(self.crew.fds())

    def release(self) -> None:
        """Let workers that are too many, and that no pass needs any more, go."""
        for owner in self.passes.values():
            owner.left_by.update(owner.schedule.take_left())
        for number in [number for number in self.links if number >= self.num_workers]:
            if all(number in owner.left_by or not owner.knows(number) for owner in self.passes.values()):
                link = self.links[number]
                link.send(messages.Stop(), self.ring)
                self.page.ring(number, {STOP: 1})
                self.crew.leave(link.handle)
                self._drop(link)

    def _drop(self, link: Link) -> None:
        """Let go of the socket of a worker that is gone."""
        self._watch.drop(link)
        link.channel.close()
        del self.links[link.number]

    @property
    def handles(self) -> list[Any]:
        """The processes, by number."""
        return [link.handle for _, link in sorted(self.links.items())]

    # -- messages -----------------------------------------------------------------------------------------------------

    def tell(self, worker: int, message: Any) -> None:
        """Send a message behind all tasks of a worker. Does not block."""
        self.links[worker].send(message, self.ring)

    def drain(self) -> None:
        """Take note of what finalizers have left behind, and use what that has freed. Lock held; does not block."""
        while self.left:
            self._leave(self.left.popleft())
        for slot_id in self.ring.drain():
            for link in self.links.values():
                link.retire(slot_id)
        self.outbox.retry()

    def _leave(self, number: int) -> None:
        """A pass was dropped before its end."""
        left = self.passes.pop(number, None)
        if left is None:
            return
        self.outbox.withdraw(left)
        left.release_owners()
        for slot_id in left.forget_results():
            self.ring.table.discard(slot_id)
        if self.is_stale_dropped and not self.is_closed:
            stale = min(self.passes, default=self.ring.next_pass) << _PASS_SHIFT
            for worker in self.links:
                self.page.ring(worker, {STALE: stale})

    # -- answers ------------------------------------------------------------------------------------------------------

    def receive(self, worker: int) -> bool:
        """Take one message of a worker if there is one. Does not block."""
        link = self.links.get(worker)
        return link is not None and self._receive(link)

    def _receive(self, link: Link) -> bool:
        try:
            received = link.channel.receive()
        except (EOFError, ConnectionError):
            self._watch.drop(link)  # it has died: the crew will say how
            return False
        except OSError as error:
            if self.is_closed:
                raise LoaderError(SHUT_DOWN) from None
            self.is_broken = True  # a message is lost: nobody would answer its task
            raise LoaderError(f"a message of a worker could not be received: {error}") from error
        if received is None:
            return False
        message, body, fds = received
        if type(message) is Answer:
            if self._deaths:
                self._deaths.pop(link.number, None)
            self._take(link, message, body, fds)
            link.flush(self.ring)
        else:
            assert isinstance(message, Ready)
            link.is_ready = True
            self._failed_starts.pop(link.number, None)
            self.crew.vouch(link.handle)
        return True

    def _take(self, link: Link, answer: Answer, body: bytes, fds: list[int]) -> None:
        """Settle a task's slot, and hand the result to its pass."""
        table, task_id = self.ring.table, answer.task_id
        owner = self.passes.get(task_id >> _PASS_SHIFT)
        granted = self.outbox.settle(task_id)
        if answer.kind is Kind.REFUSED:
            table.refuse(task_id, answer.used_bytes)
            if owner is not None:
                self.outbox.ask_again(owner, granted, answer.used_bytes)
            return
        slot_id = self._settle(answer, fds)
        layout = link.layouts.find(answer, body) if answer.kind is Kind.BATCH else (b"", body)
        is_wanted = owner is not None and owner.take(answer, slot_id, *layout)
        if slot_id is not None and not is_wanted:
            table.discard(slot_id)

    def _settle(self, answer: Answer, fds: list[int]) -> int | None:
        """The slot that an answer lies in; None where it needs none."""
        table = self.ring.table
        if answer.kind is not Kind.BATCH or not answer.used_bytes:
            for fd in fds:
                os.close(fd)
            table.abandon(answer.task_id)
            return None
        filled = table.fill(answer.task_id, answer.used_bytes, answer.new_bytes or None)
        if answer.new_bytes:
            try:
                self.ring.adopt(filled.slot_id, fds[0], answer.new_bytes)
            except OSError as error:
                os.close(fds[0])
                self.is_broken = True  # the table has a slot without memory
                raise LoaderError(f"a slot could not be mapped: {error}") from error
        return filled.slot_id

    def begin_stream(self, shared_seed: int | None) -> None:
        """A new pass over an iterable dataset: each worker asks it for a new iterator."""
        for worker in self.links:
            self.tell(worker, messages.Begin(shared_seed))

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, limit_ms: int | None) -> bool:
        """Sleep until a worker has said or become something, and take it in.

        Returns:
            False when ``limit_ms`` passed without that.
        """
        ready = self._watch.sleep(limit_ms)
        if self.is_closed:  # by another thread
            raise LoaderError(SHUT_DOWN)
        if ready is None:
            return False
        links, is_crew = ready
        for link in links:
            self._receive(link)
        if is_crew:
            self.check_crew()
        return True

    def row_of(self, worker: int, task_id: int) -> int | None:
        """The row that a worker makes now, if it is at this task and at a row."""
        task, row = self.page.read(worker, TASK) - 1, self.page.read(worker, ROW) - 1
        return row if task == task_id and row >= 0 else None

    def stack_of(self, worker: int) -> str:
        """The Python stack of a worker, the innermost frame first; empty where it gives none."""
        link = self.links[worker]
        if isinstance(link.handle, ThreadHandle):
            return link.handle.stack()
        if not link.is_ready:
            return ""
        return children.ask_for_stack(link.handle.pid, self._stack_fds[0], _STACK_LIMIT_MS)

    def check_crew(self) -> None:
        """Deal with workers that have ended. Does not block."""
        found = self.crew.dead()
        self._watch.follow_crew(self.crew.fds())
        try:
            for dead in found:
                self._bury(dead)
        except BaseException:
            self.is_broken = True  # those behind it would never be heard of again
            for dead in found:
                if dead.replacement is not None:
                    dead.replacement[0].close()
            raise
        self._watch.follow_crew(self.crew.fds())

    def _bury(self, dead: DeadWorker) -> None:
        link = self.links.get(dead.number)
        if link is None or (link.handle.pid or 0) != dead.pid:
            return  # it was let go
        while self._receive(link):
            pass
        task_id, row = self.page.read(dead.number, TASK) - 1, self.page.read(dead.number, ROW) - 1
        self._drop(link)
        if not self.is_replacing or dead.code is None:
            raise WorkerDiedError(dead.describe())
        self._replace(dead, link)
        self._warn_of_draws(dead)
        self.outbox.forget(dead.number)
        for owner in list(self.passes.values()):
            self._repeat(owner, dead, task_id if task_id >> _PASS_SHIFT == owner.number else None, row)

    def _replace(self, dead: DeadWorker, link: Link) -> None:
        self.page.reset(dead.number)
        if dead.number >= self.num_workers and dead.replacement is None:
            return
        if not link.is_ready:
            self._failed_starts[dead.number] = self._failed_starts.get(dead.number, 0) + 1
        if self._failed_starts.get(dead.number, 0) >= MAX_FAILED_STARTS:
            raise WorkerDiedError(f"{dead.describe()} It died {MAX_FAILED_STARTS} times before its first task.")
        self._deaths[dead.number] = self._deaths.get(dead.number, 0) + 1
        if self._deaths[dead.number] >= MAX_DEATHS_IN_A_ROW:
            raise WorkerDiedError(f"{dead.describe()} It died {MAX_DEATHS_IN_A_ROW} times without an answer.")
        if dead.replacement is None:
            self.start(dead.number)
        else:
            self._adopt(dead.number, *dead.replacement)

    def _warn_of_draws(self, dead: DeadWorker) -> None:
        if self.is_stale_dropped or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f'{dead.describe()} It was replaced, and with seeds="torch" the new one draws from the start again: '
            'random draws are not those of an undisturbed run. Use seeds="place", or on_worker_death="raise".',
            stacklevel=2,
        )

    def _repeat(self, owner: Pass, dead: DeadWorker, task_id: int | None, row: int) -> None:
        """Send what a dead worker had of a pass again."""
        death = owner.schedule.die(dead.number, task_id, row if row >= 0 else None)
        self.outbox.lose(death.lost_ids)
        for task in death.tasks:
            if death.verdict is not None and task.batch == death.verdict.batch:
                owner.condemn(task, death.verdict, dead)
            else:
                owner.resubmit(task)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers and give the ring back. Idempotent; blocks for about two seconds at most. Any thread."""
        if self.is_closed or os.getpid() != self._owner_pid:
            return
        self.is_closed = True
        for link in self.links.values():
            self.page.ring(link.number, {STOP: 1})
            try:
                link.channel.send(messages.Stop())
            except OSError:  # it is gone
                pass
        self.crew.close()
        for link in self.links.values():
            link.channel.close()
        self.page.close()
        children.close_all(self._stack_fds)
        self._release_slots()
        if any(isinstance(link.handle, ThreadHandle) and link.handle.is_alive() for link in self.links.values()):
            self.ring.close()  # stuck in a sample, which it may yet write to its slot: no pool may use that again
        self._on_close(self.ring)

    def close_in_child(self) -> None:
        """In a forked child: close all descriptors, and touch no process."""
        if self.is_closed:
            return
        self.is_closed = True
        self.lock = threading.Lock()  # another thread of the parent may have held it
        self.crew.close_in_child()
        for link in self.links.values():
            link.channel.close()
        os.close(self.page.fd)
        children.close_all(self._stack_fds)

    def _release_slots(self) -> None:
        """No worker is left: nobody writes to any slot."""
        table = self.ring.table
        for owner in list(self.passes.values()):
            for slot_id in owner.forget_results():
                table.discard(slot_id)
        self.outbox.forget(None)
        self.passes.clear()
