"""Workers that die: replaced, their batches unchanged; or reported."""

import os
import signal
import time

import pytest
import torch

from headrace import Loader
from headrace.errors import WorkerDiedError, WorkerTimeoutError
from tests.loader.datasets import Drawing, Dying, Numbers, Stream, Stuck, die_at_start

#: Of this machine's cores, which are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def epoch(loader):
    return [[part.clone() if isinstance(part, torch.Tensor) else part for part in batch] for batch in loader]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit"])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_that_dies_once_changes_no_batch(how, method, tmp_path):
    """It is replaced, and its batch is made again with the same draws."""
    options = {"batch_size": 4, "num_workers": 2, "shuffle": True, "multiprocessing_context": method}
    torch.manual_seed(1)
    want = epoch(Loader(Dying(40, None, how), **options))
    torch.manual_seed(1)
    got = epoch(Loader(Dying(40, 17, how, str(tmp_path / "mark")), **options))
    assert (tmp_path / "mark").exists()
    assert same(got, want)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGKILL", r"pid \d+\) is killed by signal: Killed .*memory"),
        ("SIGSEGV", r"pid \d+\) is killed by signal: Segmentation fault"),
        ("exit", r"pid \d+\) exited unexpectedly with exit status 7"),
    ],
)
def test_a_sample_that_kills_two_workers_is_named(how, words):
    """With its index, how the worker ended, and the likely cause; the batches before it and after it arrive."""
    loader = Loader(Dying(12, 5, how), batch_size=2, num_workers=2)
    got, iterator = [], iter(loader)
    while True:
        try:
            got.append(next(iterator)[0].tolist())
        except StopIteration:
            break
        except WorkerDiedError as error:
            got.append(str(error))
    import re

    assert got[:2] + got[3:] == [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]
    assert re.search(words, got[2]), got[2]
    assert "index 5 (row 1 of batch 2)" in got[2]


@pytest.mark.parametrize("by", ["option", "variable"])
def test_restarting_can_be_switched_off(by, monkeypatch):
    """Then the first death is an error, as with DataLoader, and the next pass starts new workers."""
    if by == "variable":
        monkeypatch.setenv("HEADRACE_ON_WORKER_DEATH", "raise")
    more = {"on_worker_death": "raise"} if by == "option" else {}
    loader = Loader(Dying(12, 5, "SIGKILL"), batch_size=2, num_workers=2, persistent_workers=True, **more)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: "):
            list(loader)


def test_idle_workers_may_be_killed():
    """Nobody is blamed, and nothing changes."""
    loader = Loader(Drawing(40), batch_size=2, num_workers=2, persistent_workers=True)
    list(loader)
    for _ in range(3):
        for worker in loader._iterator._workers:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join(5)
            assert worker.exitcode == -signal.SIGKILL
        assert [x for batch in loader for x in batch[0].tolist()] == list(range(40))


def test_a_replacement_does_not_wait_for_the_trainer():
    """A worker that dies while the trainer is busy with its step is there again before the step ends."""
    loader = Loader(Numbers(40), batch_size=2, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    (worker,) = loader._iterator._workers
    os.kill(worker.pid, signal.SIGKILL)
    began = time.monotonic()
    crew = loader._iterator._pool.crew
    crew.wait_for(lambda: any(dead.replacement for dead in crew._dead), 5)
    assert time.monotonic() - began < 0.5
    assert [x for _, y in iterator for x in y.tolist()] == list(range(2, 40))


def test_workers_that_die_before_their_first_task_are_reported():
    """They are not started for ever."""
    with pytest.raises(WorkerDiedError, match="exit status 3"):
        list(Loader(range(4), num_workers=1, worker_init_fn=die_at_start))


def test_the_worker_of_a_stream_is_not_replaced():
    """Nobody knows what it has given already."""
    loader = Loader(Stream((100_000,)), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        for _ in iterator:
            pass


def test_the_helpers_death_is_reported():
    """Its workers end with it, and the loop gets an error."""
    loader = Loader(Stuck(10, 4), batch_size=2, num_workers=1)
    iterator = iter(loader)
    worker, helper = iterator._workers[0], iterator._pool.crew._helper_pid
    next(iterator)
    os.kill(helper, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="helper"):
        list(iterator)
    assert not worker.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_time_out_shows_the_workers_stack(kind):
    """The message has the batch, the index, and the line in which the worker is stuck."""
    loader = Loader(
        Stuck(10, 4 if kind == "process" else 20), batch_size=2, num_workers=2, timeout=0.5, workers_as=kind
    )
    if kind == "thread":
        assert len(list(loader)) == 5
        return
    with pytest.raises(WorkerTimeoutError, match=r"timed out after 0.5 seconds") as caught:
        list(loader)
    assert "index 4" in str(caught.value)
    assert "__getitem__" in str(caught.value)
