"""Nothing waits for ever, spins or lies, whatever is refused, forked, left or closed in the middle of it."""

import contextlib
import gc
import os
import select
import signal
import socket
import threading
import time

import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from headrace import Loader
from headrace.core.room import MemoryLevel, Room
from headrace.errors import LoaderError, MemoryLimitError
from headrace.host.memfd import Segment
from headrace.loader import holdings, worker
from headrace.loader.channel import Channel
from headrace.loader.control import ControlPage
from headrace.loader.lease import Freed
from headrace.loader.messages import Answer, Kind, Parts
from headrace.loader.ring import Ring
from headrace.loader.setup import WorkerSetup
from tests.loader.datasets import Numbers, Slow, Stuck
from tests.loader.within import within

#: Of this machine's cores, which are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def drawn(loader):
    """The first numbers of all batches, and the errors in their places."""
    got, iterator = [], iter(loader)
    while True:
        try:
            got.append(next(iterator)[1].tolist())
        except StopIteration:
            return got
        except LoaderError as error:
            got.append(type(error))
            if iterator._shutdown:
                return got


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False])
def test_a_budget_below_one_batch_stops_nothing(in_order):
    """The batch that is waited for may go beyond it, whichever that is."""
    options = {"batch_size": 2, "num_workers": 2, "in_order": in_order, "memory_limit": 65_536}
    with pytest.warns(UserWarning, match="memory_limit"):
        got = within(10, lambda: [batch[1].tolist() for batch in Loader(Numbers(12, 100_000), **options)])
    assert sorted(got) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


class Uneven(Slow):
    """The first sample is small and slow, the others are big."""

    def __getitem__(self, index):
        time.sleep(self.seconds.get(index, 0))
        return torch.zeros(100 if index == 0 else 1_000_000), index


@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_that_the_machine_has_no_room_for_is_not_asked_for_again_and_again(in_order, monkeypatch):
    """Trainer and worker would spin until it is its turn; out of order, for ever."""
    monkeypatch.setattr(holdings, "room", lambda _: Room(1 << 20, MemoryLevel("the test", 1 << 21, 1 << 20, 0)))
    loader = Loader(Uneven(4, {0: 2.0}), num_workers=2, in_order=in_order)
    got = within(10, lambda: drawn(loader))
    assert sorted(map(str, got)) == sorted(map(str, [[0], *[MemoryLimitError] * 3]))


@pytest.mark.slow
def test_a_stolen_batch_may_be_refused():
    """The parts of others come once; the second try has them too."""
    loader = Loader(Slow(64, dict.fromkeys(range(16), 0.04)), batch_size=16, num_workers=3, memory_limit=200_000)
    with pytest.warns(UserWarning, match="memory_limit"):
        got = within(10, lambda: [index.tolist() for index, _, x in loader if (x == index.view(-1, 1)).all()])
    assert got == [list(range(n, n + 16)) for n in range(0, 64, 16)]


def test_a_slot_that_a_child_may_read_retires_once():
    """Also where it lies beyond the budget, and has retired already."""
    ring = Ring(1 << 20)
    ring.table.assign(0, 0)
    slot_id = ring.table.fill(0, 4096, 4096).slot_id
    segment = Segment.create(4096)
    ring.adopt(slot_id, os.dup(segment.fd), 4096)
    segment.close()
    ring.table.deliver(slot_id, 1)
    ring.table.set_budget(0, 1)
    ring._freed.append(Freed(slot_id, 1, False))
    assert ring.drain() == [slot_id]
    ring.close()


# -- forks ------------------------------------------------------------------------------------------------------------


def in_child(work):
    """What ``work`` says in a forked child, and the child's exit status."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os.write(write, repr(work()).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        text = file.read().decode()
    return text, os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_child_takes_no_batch_of_its_parent(persistent):
    """Its iterator says so, its loader starts workers of its own, and the parent notices nothing."""
    loader = Loader(Numbers(12, 20_000), batch_size=2, num_workers=1, persistent_workers=persistent)
    list(loader)
    iterator = iter(loader)
    held = next(iterator)

    def child():
        try:
            next(iterator)
        except LoaderError as error:
            words = str(error)[:27]
        return words, [y.tolist() for _, y in loader], held[0][1, 0].item()

    want = "the workers of this iterato", [[n, n + 1] for n in range(0, 12, 2)], 1.0
    assert in_child(child) == (repr(want), 0)
    assert [y.tolist() for _, y in iterator] == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_what_a_child_holds_does_not_change():
    """The trainer forks, lets the batch go and makes others; the child reads what was there."""
    loader = Loader(Numbers(40, 20_000), batch_size=2, num_workers=1)
    iterator = iter(loader)
    batch = next(iterator)
    go_read, go_write = os.pipe()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go_read, 1)
        # numpy: torch's thread pool does not survive a fork (GNU OpenMP), whoever made the memory.
        os.write(write, repr(float(batch[0].numpy().sum())).encode())
        os._exit(0)
    del batch
    for _ in iterator:
        pass
    os.write(go_write, b"x")
    assert os.read(read, 100).decode() == repr(20_000.0)
    os.waitpid(pid, 0)
    for fd in (go_read, go_write, read, write):
        os.close(fd)


class Remembering(Numbers):
    """Each sample says what a batch looks like that the trainer has given it before it was forked."""

    held = None

    def __getitem__(self, index):
        return torch.full((20_000,), float(index)), -1.0 if self.held is None else self.held.sum().item()


def test_a_batch_that_a_dataset_holds_does_not_change_in_its_workers():
    """They have forked with it: its slot must not be used again, as long as they may read it."""
    dataset = Remembering(40)
    loader = Loader(dataset, batch_size=2, num_workers=1)
    dataset.held = next(iter(loader))[0]
    got = []
    for _, sums in loader:
        dataset.held = None
        got += sums.tolist()
    assert got == [20_000.0] * 40


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_shutting_down_in_another_thread_is_an_error_of_ours():
    """And no error of a descriptor that is closed."""
    iterator = iter(Loader(Stuck(4, 0), num_workers=1))
    threading.Timer(0.3, iterator._shutdown_workers).start()
    with pytest.raises(LoaderError, match="shut down"):
        within(8, lambda: next(iterator))


class Moody(IterableDataset):
    """Its first stream cannot be opened."""

    num_opened = 0

    def __iter__(self):
        self.num_opened += 1
        if self.num_opened == 1:
            raise ValueError("not today")
        return iter(range(3))


def test_a_stream_that_could_not_be_opened_is_opened_in_the_next_pass():
    """By the same worker."""
    loader = Loader(Moody(), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(2):  # as many tasks as are under way
        with contextlib.suppress(ValueError):
            next(iterator)
    del iterator
    gc.collect()
    assert [x.item() for x in loader] == [0, 1, 2]


class Pids(IterableDataset):
    """Says which process it is read in."""

    def __iter__(self):
        return iter([os.getpid()] * 9)


def test_a_stream_that_was_left_early_is_read_by_the_same_worker_again():
    """It is not taken for one that is still being read."""
    loader = Loader(Pids(), num_workers=1, persistent_workers=True)
    assert len({next(iter(loader)).item() for _ in range(3)}) == 1


def collate(items):
    """A collate_fn that uses torch's own."""
    batch = default_collate(items)
    return batch, batch[0].is_shared()


def test_torchs_collate_in_a_users_own_takes_no_shared_memory_file():
    """A small /dev/shm would end the worker with a bus error."""
    assert [is_shared for _, is_shared in Loader(Numbers(4), num_workers=1, collate_fn=collate)] == [False] * 4


def test_parts_that_come_after_the_answer_are_dropped():
    """Or a worker would keep them for ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page = ControlPage.create()
    setup = WorkerSetup(
        dataset=Numbers(4),
        is_iterable=False,
        auto_collation=True,
        collate_fn=default_collate,
        drop_last=False,
        init_fn=None,
        base_seed=0,
        num_workers=1,
        shared_seed=None,
        seeds="place",
        is_thread=True,
    )
    made = worker.Worker(0, Channel(theirs, is_blocking=True), page, setup)
    made._joiner._open.add(7)
    made._handle(Parts(7, (), ()))
    made._handle(Parts(6, (), ()))
    assert list(made._joiner._parts) == [7]
    made._answer(Answer(Kind.SKIPPED, 7))
    assert not made._joiner._parts
    assert not made._joiner._open
    made.close()
    ours.close()
    page.close()


def test_a_poll_on_an_end_that_is_closed_is_no_endless_loop():
    """The helper's socket is closed and the helper lives: its end is waited for without a look at the socket."""
    iterator = iter(Loader(Numbers(4), num_workers=1))
    crew = iterator._pool.crew
    next(iterator)
    crew._channel.sock.shutdown(socket.SHUT_RD)
    poller = select.poll()
    poller.register(crew._channel.fileno(), select.POLLIN)
    assert poller.poll(0)
    crew.pump()
    assert crew._is_lost
    began_s = time.process_time()
    assert not crew._wait_for_helper(200)
    assert time.process_time() - began_s < 0.1
