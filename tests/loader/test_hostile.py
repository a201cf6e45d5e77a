"""Nothing waits for ever, spins or lies, whatever dies, is refused, forked or closed in the middle of it."""

import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
import torch

from headrace import Loader
from headrace.core.schedule import Task as Planned
from headrace.core.schedule import TaskKind
from headrace.errors import LoaderError, WorkerDiedError
from headrace.loader import helper, worker
from headrace.loader.channel import Channel
from headrace.loader.control import ControlPage
from headrace.loader.crew import DeadWorker
from headrace.loader.messages import Ready
from headrace.loader.pool import Pool
from headrace.loader.ring import Ring
from tests.loader.datasets import Dying, Failing, Numbers
from tests.loader.within import within

#: Of this machine's cores, which are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# -- deaths -----------------------------------------------------------------------------------------------------------


def test_a_helper_that_dies_before_its_workers_have_started_is_reported(monkeypatch):
    """Nobody knows the workers' processes then, and nobody waits for them."""
    monkeypatch.setattr(helper._Helper, "serve", lambda self: os._exit(1))
    with pytest.raises(WorkerDiedError, match="helper"):
        within(8, lambda: list(Loader(Numbers(8), num_workers=2)))


class Mortal(Numbers):
    """Each worker dies one row later than the one before it."""

    def __init__(self, size, mark):
        super().__init__(size)
        self.mark = mark

    def __getitem__(self, index):
        num_deaths = os.path.getsize(self.mark)
        if index >= num_deaths:
            with open(self.mark, "ab") as file:
                file.write(b".")
            os._exit(1)
        return index


def test_replacing_ends_when_every_worker_dies_at_another_sample(tmp_path):
    """Killing and replacing is no endless loop, in which trainer and helper would spin."""
    (tmp_path / "mark").touch()
    loader = Loader(Mortal(64, str(tmp_path / "mark")), batch_size=64, num_workers=1)
    with pytest.raises(WorkerDiedError, match="16 workers have died"):
        within(20, lambda: list(loader))


def test_replacing_ends_when_workers_die_between_ready_and_their_first_task(monkeypatch):
    """No sample is to blame, and each of them has been ready."""
    monkeypatch.setattr(worker.Worker, "_next", lambda self: os._exit(9))
    with pytest.raises(WorkerDiedError, match=r"exit status 9.* 20 times without an answer"):
        within(20, lambda: list(Loader(Numbers(4), num_workers=1)))


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_program_may_ignore_or_handle_the_death_of_children(handler, tmp_path):
    """The helper reaps its workers all the same, and the trainer its helper, where it can."""
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        loader = Loader(Dying(8, 5, "SIGKILL", str(tmp_path / "mark")), batch_size=2, num_workers=1)
        assert within(10, lambda: [batch[0].tolist() for batch in loader]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_replacement_that_draws_otherwise_is_said(tmp_path):
    """With torch's seeds a worker's draws follow from all that it has made before."""
    loader = Loader(Dying(8, 5, "SIGKILL", str(tmp_path / "mark")), batch_size=2, num_workers=1, seeds="torch")
    with pytest.warns(UserWarning, match="draws from the start again"):
        assert within(8, lambda: [batch[0].tolist() for batch in loader]) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_handlers_of_the_program_do_not_run_in_the_helper():
    """A scheduler may send a signal to all processes; the helper ignores it, workers do what the program would."""
    before = signal.signal(signal.SIGUSR1, lambda *_: 1 / 0)
    try:
        loader = Loader(Numbers(8), num_workers=1, on_worker_death="raise")
        iterator = iter(loader)
        next(iterator)
        crew = iterator._pool.crew
        os.kill(crew._helper_pid, signal.SIGUSR1)
        crew.wait_for(lambda: crew._is_lost, 0.3)
        assert within(8, lambda: len(list(iterator))) == 7
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_spawned_workers_that_the_program_has_reaped_are_replaced(tmp_path):
    """How they ended is not known then; they are gone all the same."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        data = Dying(8, 5, "SIGKILL", str(tmp_path / "mark"))
        loader = Loader(data, batch_size=2, num_workers=1, multiprocessing_context="spawn")
        assert within(40, lambda: [batch[0].tolist() for batch in loader]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    finally:
        signal.signal(signal.SIGCHLD, before)


class Orphaning(Numbers):
    """Index 5 ends its worker once, and a child of it holds all that it had open."""

    def __init__(self, size, mark):
        super().__init__(size)
        self.mark = mark

    def __getitem__(self, index):
        if index == 5 and not os.path.exists(self.mark):
            open(self.mark, "x").close()
            if os.fork() == 0:
                time.sleep(10)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_a_worker_does_not_hide_its_end(method, tmp_path):
    """It holds the ends of all pipes and sockets open."""
    loader = Loader(Orphaning(8, str(tmp_path / "mark")), num_workers=1, multiprocessing_context=method)
    assert within(30, lambda: [batch.item() for batch in loader]) == list(range(8))


def test_a_thread_that_a_sample_ends_is_replaced_and_the_sample_reported():
    """``sys.exit()`` in a dataset ends no process here."""
    loader = Loader(Failing(6, 3, SystemExit(3)), num_workers=2, workers_as="thread")
    with pytest.raises(WorkerDiedError, match="index 3"):
        within(8, lambda: list(loader))


def test_many_workers_start_over_a_small_socket(monkeypatch):
    """The helper may have to be read before it reads on."""
    make = Channel.pair

    def narrow():
        for end in (ends := make()):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return ends

    monkeypatch.setattr(Channel, "pair", staticmethod(narrow))
    assert within(20, lambda: len(list(Loader(Numbers(24), num_workers=12)))) == 24


class Lazy(Numbers):
    """Takes its time over the first batch of the first pass, without a look at anything else."""

    is_slow = True

    def __getitems__(self, indices):
        if self.is_slow and indices[0] == 2:
            self.is_slow = False
            time.sleep(1.6)
            return [(torch.full((self.width,), -1.0), index) for index in indices]
        return [self[index] for index in indices]


@pytest.mark.slow
def test_a_thread_that_is_left_behind_writes_to_no_batch():
    """It is stuck in a sample when its pass is left, and ends that while the next pass runs."""
    loader = Loader(Lazy(80, 50_000), batch_size=2, num_workers=1, workers_as="thread", prefetch_factor=1)
    iterator = iter(loader)
    next(iterator)
    thread = iterator._workers[0]
    del iterator
    assert thread.is_alive()
    kept = [batch for batch, _ in zip(loader, range(30), strict=False)]
    thread.join(5)
    assert not thread.is_alive()
    assert all((x == y.view(-1, 1)).all() for x, y in kept)


# -- a pool over a crew of paper --------------------------------------------------------------------------------------


class PaperCrew:
    """Workers that are the other end of a socket pair; a process of each is a pipe."""

    def __init__(self):
        self.ends, self.processes, self.pids = {}, {}, iter(range(1, 100))

    def start(self, number):
        ours, self.ends[number] = Channel.pair()
        pid = next(self.pids)
        self.processes[pid] = number, *os.pipe()
        return Channel(ours, is_blocking=False), SimpleNamespace(pid=pid)

    def fds(self):
        return [read for _, read, _ in self.processes.values()]

    def dead(self):
        found = []
        for pid, (number, read, write) in list(self.processes.items()):
            if write is None:
                os.close(read)
                del self.processes[pid]
                found.append(DeadWorker(number, pid, -9, None))
        return found

    def die(self, pid):
        number, read, write = self.processes[pid]
        os.close(write)
        self.processes[pid] = number, read, None

    def vouch(self, handle):
        pass

    def close(self):
        for _, read, write in self.processes.values():
            os.close(read)
            if write is not None:
                os.close(write)
        for end in self.ends.values():
            end.close()


@pytest.fixture
def pool():
    made = Pool(
        PaperCrew(),
        ControlPage.create(),
        os.pipe(),
        Ring(1 << 20),
        2,
        is_replacing=True,
        is_stale_dropped=True,
        on_close=lambda ring: ring.close(),
    )
    yield made
    made.close()


def test_descriptors_of_the_dead_may_be_numbers_of_the_living(pool):
    """Two die at once, and the sockets of their replacements get the numbers that were just closed."""
    crew = pool.crew
    for pid, link in list(zip((1, 2), pool.links.values(), strict=True)):
        link.is_ready = True
        crew.ends[link.number].close()
        crew.die(pid)
    while pool.wait(0):
        pass
    assert sorted(crew.processes) == [3, 4]
    for number in (0, 1):
        Channel(crew.ends[number], is_blocking=True).send(Ready(1))
        assert pool.wait(1000)
        assert pool.links[number].is_ready


def test_no_task_overtakes_another_of_its_worker(pool):
    """In a stream their order is their contents."""
    table, owner = pool.ring.table, SimpleNamespace(epoch=0, indices={0: [0], 1: [1], 2: [2]})
    first, second, other = (Planned(n, TaskKind.BATCH, n, worker, 0, 1) for n, worker in enumerate((0, 0, 1)))
    table.set_budget(0, 1)
    pool.outbox.submit(owner, first)
    table.set_budget(1 << 20, 4)
    pool.outbox.submit(owner, second)
    pool.outbox.submit(owner, other)
    pool.drain()
    for number, ids in ((0, [0, 1]), (1, [2])):
        channel = Channel(pool.crew.ends[number], is_blocking=False)
        got = [channel.receive(), channel.receive()]
        assert [received[0].task_id for received in got if received] == ids


def test_a_lost_message_ends_the_pool(monkeypatch):
    """Nobody would ever answer its task."""
    loader = Loader(Numbers(8), num_workers=1)
    iterator = iter(loader)
    link = iterator._pool.links[0]

    def lose():
        raise OSError(24, "no descriptor is left")

    monkeypatch.setattr(link.channel, "receive", lose)
    for words in ("no descriptor", "shut down"):
        with pytest.raises(LoaderError, match=words):
            within(5, lambda: next(iterator))
