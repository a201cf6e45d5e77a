"""What programs rely on in DataLoader, documented or not."""

import inspect
import multiprocessing
import os
import subprocess

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, default_collate, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import headrace
from headrace import Loader
from tests.loader.datasets import Numbers, Who

#: Of this machine's cores, which are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_it_is_a_dataloader_with_the_same_attributes():
    """``isinstance``, attributes, refusal to have some set later."""
    loader = Loader(range(10), batch_size=3, shuffle=True, num_workers=2, drop_last=True, timeout=5, prefetch_factor=4)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.sampler, RandomSampler)
    assert loader.collate_fn is default_collate
    assert (loader.batch_size, loader.num_workers, loader.timeout, loader.prefetch_factor) == (3, 2, 5, 4)
    assert len(loader) == 3
    assert loader._DataLoader__initialized is True
    for name in ("batch_size", "sampler", "dataset", "drop_last"):
        with pytest.raises(ValueError, match=name):
            setattr(loader, name, None)


def test_the_constructor_takes_what_dataloaders_takes():
    """In the same places, with the same defaults; our own options are named ones with an attribute each."""
    ours, torchs = inspect.signature(Loader).parameters, inspect.signature(DataLoader).parameters
    assert [p for p in ours if p in torchs] == list(torchs)
    assert all(ours[p].default == torchs[p].default and ours[p].kind is torchs[p].kind for p in torchs)
    own = [p for p in ours if p not in torchs]
    assert own == ["workers_as", "seeds", "memory_limit", "task_rows", "on_worker_death", "read_ahead_epochs"]
    loader = Loader(range(3))
    assert all(hasattr(loader, name) for name in own)
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in own)


def test_the_package_offers_it_late():
    """``headrace.Loader`` is looked up when it is first used."""
    assert headrace.Loader is Loader
    assert "Loader" in dir(headrace)


def test_batch_sampler_can_be_exchanged_through_object():
    """As Ultralytics does for its endless loader."""

    class Repeat:
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            while True:
                yield from iter(self.sampler)

        def __len__(self):
            return len(self.sampler)

    loader = Loader(range(4), batch_size=2, num_workers=1)
    object.__setattr__(loader, "batch_sampler", Repeat(loader.batch_sampler))
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(4)] == [[0, 1], [2, 3]] * 2
    assert isinstance(iterator, _MultiProcessingDataLoaderIter)
    for worker in iterator._workers:
        if worker.is_alive():
            worker.terminate()
    iterator._shutdown_workers()
    assert not any(worker.is_alive() for worker in iterator._workers)


def test_get_iterator_makes_one():
    """As fastai and others call it."""
    iterator = Loader(range(4), batch_size=2, num_workers=1)._get_iterator()
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3]]


def test_set_epoch_counts_from_the_next_pass_on():
    """Nothing is read ahead."""
    sampler = DistributedSampler(range(11), num_replicas=3, rank=0, shuffle=True, seed=1)
    loader = Loader(range(11), batch_size=2, sampler=sampler, num_workers=1, persistent_workers=True)
    passes = []
    for epoch in (0, 0, 1):
        sampler.set_epoch(epoch)
        passes.append([batch.tolist() for batch in loader])
    assert passes[0] == passes[1] != passes[2]


@pytest.mark.parametrize("pin_memory", [False, True])
def test_pinning_without_a_device(pin_memory):
    """A warning at most."""
    if pin_memory and not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="no accelerator"):
            got = list(Loader(Numbers(4), batch_size=2, num_workers=1, pin_memory=True))
    else:
        got = list(Loader(Numbers(4), batch_size=2, num_workers=1))
    assert [y.tolist() for _, y in got] == [[0, 1], [2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["forkserver", multiprocessing.get_context("spawn"), "fork"])
def test_every_start_method_gives_the_same(context):
    """Given by name or as a context."""
    loader = Loader(Who(9), batch_size=4, num_workers=2, multiprocessing_context=context)
    rows = [[part.tolist() for part in batch] for batch in loader]
    assert [row[0] for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [set(row[1]) for row in rows] == [{0}, {1}, {0}]
    assert all(pid != os.getpid() for row in rows for pid in row[3])


@pytest.mark.slow
def test_what_cannot_be_unpickled_is_an_error_of_the_loop():
    """With the name of what was not found, and not a worker that dies."""
    code = """
from headrace import Loader
class CellDataset:
    def __len__(self): return 4
    def __getitem__(self, i): return i
try:
    list(Loader(CellDataset(), num_workers=1, multiprocessing_context="spawn"))
except Exception as error:
    print(type(error).__name__, error)
"""
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "AttributeError" in done.stdout, done.stderr
    assert "CellDataset" in done.stdout


class Processes:
    """What a dataset may start."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 0:
            return subprocess.run(["echo", "40"], capture_output=True, text=True, check=True).stdout
        with multiprocessing.Pool(1) as pool:
            return pool.map(str, [41])[0]


def test_processes_inside_a_dataset():
    """Tools can be run; a Pool is refused as in DataLoader's daemonic workers."""
    iterator = iter(Loader(Processes(), num_workers=1))
    assert next(iterator) == ["40\n"]
    with pytest.raises(AssertionError, match="daemonic"):
        next(iterator)


class Threads(Numbers):
    def __getitem__(self, index):
        info = get_worker_info()
        return (
            index,
            info.id,
            int(info.rng.torch_generator is not None),
            torch.rand((), generator=info.rng.torch_generator),
        )


def test_threads_give_the_same_batches_as_processes():
    """Also what they draw from ``get_worker_info().rng``; and the main thread is no worker."""
    found = []
    for kind in ("process", "thread"):
        torch.manual_seed(1)
        loader = Loader(Threads(20), batch_size=4, num_workers=2, workers_as=kind)
        found.append([[part.tolist() for part in batch] for _ in range(2) for batch in loader])
    assert found[0] == found[1]
    assert get_worker_info() is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_another_default_device_changes_nothing(num_workers):
    """Batches lie on the CPU, shuffled; DataLoader's sampler fails."""
    torch.set_default_device("meta")
    try:
        batches = list(Loader(range(12), batch_size=4, shuffle=True, num_workers=num_workers))
    finally:
        torch.set_default_device(None)
    assert sorted(x for batch in batches for x in batch.tolist()) == list(range(12))
