"""The same batches as DataLoader's, in the same order, whatever the number of workers."""

import gc
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from headrace import Loader
from headrace.errors import UsageError
from tests.loader.datasets import Drawing, Failing, Numbers, Who, fail_to_start, square

#: Of this machine's cores, which are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def flat(batches):
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_come_in_the_samplers_order(num_workers, persistent):
    """Two passes give what DataLoader gives, the short last batch included."""
    options = {"batch_size": 4, "num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    loader = Loader(Numbers(22), **options)
    for _ in range(2):
        assert flat(loader) == flat(DataLoader(Numbers(22), batch_size=4))


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
def test_draws_follow_the_place(in_order):
    """The same seed gives the same batches, bit for bit, with any number of workers and any depth."""
    found = []
    for num_workers, prefetch in ((0, None), (1, 2), (2, 1), (3, 4)):
        torch.manual_seed(7)
        loader = Loader(
            Drawing(24),
            batch_size=4,
            shuffle=True,
            num_workers=num_workers,
            prefetch_factor=prefetch,
            in_order=in_order,
        )
        found.append([sorted(flat(loader)) for _ in range(2)])
    assert all(one == found[0] for one in found[1:])
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_global_generators_end_as_with_dataloader(persistent, shuffle):
    """After each pass torch's, numpy's and Python's generators are where DataLoader with workers leaves them."""
    states = []
    for cls in (DataLoader, Loader):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        loader = cls(Numbers(10), batch_size=4, shuffle=shuffle, num_workers=1, persistent_workers=persistent)
        for _ in range(2):
            list(loader)
            states.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()))
    assert states[:2] == states[2:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_seeds_are_dataloaders(num_workers):
    """``seeds="torch"`` gives DataLoader's own draws."""
    found = []
    for cls, more in ((DataLoader, {}), (Loader, {"seeds": "torch"})):
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        found.append(flat(cls(Drawing(12), batch_size=4, shuffle=True, num_workers=num_workers, **more)))
    assert found[0] == found[1]


def test_batch_k_belongs_to_worker_k_mod_n():
    """People's code counts on it."""
    loader = Loader(Who(24), batch_size=2, num_workers=3)
    for number, (_, worker, num_workers, _) in enumerate(loader):
        assert worker.tolist() == [number % 3] * 2
        assert num_workers.tolist() == [3, 3]
    assert get_worker_info() is None


def test_a_custom_collate_function():
    """What it returns arrives."""
    loader = Loader(range(6), batch_size=3, num_workers=2, collate_fn=square)
    assert [batch.tolist() for batch in loader] == [[0, 1, 4], [9, 16, 25]]


def test_kept_batches_keep_their_values():
    """``list(loader)`` gets more memory, never a wrong value."""
    loader = Loader(Numbers(60, width=20_000), batch_size=2, num_workers=2, persistent_workers=True)
    kept = [batch for _ in range(2) for batch in loader]
    assert all((x == y.view(-1, 1)).all() for x, y in kept)
    views = [x[0, :3] for x, _ in kept]
    del kept
    list(loader)
    assert [view[0].item() for view in views] == [2.0 * (k % 30) for k in range(60)]


def test_slots_are_used_again():
    """A pass over many batches makes as many slots as are in use at a time."""
    loader = Loader(Numbers(120, width=20_000), batch_size=2, num_workers=2, persistent_workers=True)
    for _ in range(3):
        for batch in loader:
            del batch
    assert len(loader._iterator._pool.ring.mappings) <= 2 * 2 + 2


def test_the_budget_copies_batches_out():
    """Beyond ``memory_limit`` batches are copied, which is said once; no value is wrong."""
    loader = Loader(Numbers(60, width=50_000), batch_size=2, num_workers=2, memory_limit=4_000_000)
    with pytest.warns(UserWarning, match="memory_limit") as warnings:
        kept = list(loader)
    assert len([w for w in warnings if "memory_limit" in str(w.message)]) == 1
    assert all((x == y.view(-1, 1)).all() for x, y in kept)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_tensor_dataset_is_gathered(num_workers):
    """Batches are DataLoader's, negative indices included."""
    data = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))
    options = {"sampler": [0, -1, 3, 9, 2], "batch_size": 2}
    got = flat(Loader(data, num_workers=num_workers, **options))
    assert got == flat(DataLoader(data, **options))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_comes_in_its_turn_and_the_pass_goes_on(num_workers, persistent):
    """As with DataLoader, ``next()`` may be called again after an exception of the dataset."""
    options = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    loader = Loader(Failing(12, 5, ValueError("bad file")), batch_size=2, **options)
    for _ in range(2):
        iterator, got = iter(loader), []
        for _ in range(6):
            try:
                got.append(next(iterator).tolist())
            except ValueError as error:
                got.append("bad file" in str(error))
        assert got == [[0, 1], [2, 3], True, [6, 7], [8, 9], [10, 11]]
        with pytest.raises(StopIteration):
            next(iterator)


def test_stop_iteration_of_a_sample_is_an_error():
    """DataLoader ends the epoch without a word."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Loader(Failing(6, 3, StopIteration("no more")), batch_size=2, num_workers=1))


def test_an_error_of_worker_init_fn_arrives():
    """With its own type, in the first batch of that worker."""
    with pytest.raises(AttributeError, match="has no attribute 'start'"):
        list(Loader(range(16), batch_size=2, num_workers=2, worker_init_fn=fail_to_start))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_samplers_error_comes_after_the_batches_before_it(num_workers):
    """DataLoader loses the batches that were prefetched."""

    def sampler():
        yield from (0, 1, 2, 3)
        raise LookupError("shard list ended early")

    class Bad:
        def __iter__(self):
            return sampler()

        def __len__(self):
            return 8

    loader = Loader(range(10), sampler=Bad(), batch_size=2, num_workers=num_workers)
    for _ in range(2):
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(LookupError, match="ended early"):
            next(iterator)


def test_two_passes_over_persistent_workers_are_independent():
    """``zip(loader, loader)``, nested loops and old iterators get their own batches."""
    loader = Loader(range(12), batch_size=2, num_workers=2, persistent_workers=True)
    want = [[2 * k, 2 * k + 1] for k in range(6)]
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [(k, k) for k in want]
    old = iter(loader)
    assert next(old).tolist() == want[0]
    assert [batch.tolist() for batch in loader] == want
    assert [batch.tolist() for batch in old] == want[1:]
    assert len({handle.pid for handle in loader._iterator._workers}) == 2


def test_the_iterator_of_persistent_workers_is_dataloaders_class():
    """Programs look for it, and end the workers through it."""
    loader = Loader(range(4), num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    list(loader)
    assert isinstance(loader._iterator, _MultiProcessingDataLoaderIter)
    (worker,) = loader._iterator._workers
    assert worker.is_alive()
    loader._iterator._shutdown_workers()
    assert not worker.is_alive()
    assert worker.exitcode == 0
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"seeds": "mine"},
        {"workers_as": "fibre"},
        {"on_worker_death": "ignore"},
        {"memory_limit": 0},
        {"task_rows": -1},
        {"workers_as": "thread", "seeds": "torch"},
    ],
)
def test_wrong_options_are_refused(wrong):
    """The bad value is in the message."""
    with pytest.raises(UsageError, match=str(list(wrong.values())[-1])):
        Loader(range(4), **wrong)


def test_reading_ahead_starts_the_next_pass_early():
    """With ``read_ahead_epochs`` the next pass has begun when the last batch of this one is delivered."""
    loader = Loader(Numbers(16), batch_size=4, num_workers=1, persistent_workers=True, read_ahead_epochs=True)
    for _ in range(3):
        assert flat(loader) == flat(DataLoader(Numbers(16), batch_size=4))
        assert loader._iterator._pool.early is not None


@pytest.mark.parametrize("kind", ["fork", "thread"])
def test_memory_goes_with_the_loader(kind):
    """A batch that outlives its loader keeps its values."""
    loader = Loader(
        Numbers(8, width=20_000), batch_size=2, num_workers=1, workers_as="thread" if kind == "thread" else "process"
    )
    iterator = iter(loader)
    x, _ = next(iterator)
    del iterator, loader
    gc.collect()
    assert x[:, 5].tolist() == [0.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_is_resumed_with_another_number_of_workers(persistent):
    """What comes after ``load_state_dict`` is what would have come, this pass and the next, bit for bit."""

    def make(num_workers):
        return Loader(
            Drawing(40),
            batch_size=4,
            shuffle=True,
            num_workers=num_workers,
            persistent_workers=persistent and num_workers > 0,
        )

    torch.manual_seed(9)
    loader = make(2)
    list(loader)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    want = [flat(iterator), flat(loader)]
    for num_workers in (0, 1, 3):
        torch.manual_seed(1000)
        resumed = make(num_workers)
        resumed.load_state_dict(state)
        rest = flat(resumed)
        assert rest == want[0]
        if not persistent:
            assert flat(resumed) == want[1]


class Reusing(Numbers):
    """Fills one buffer again and again."""

    def __init__(self, size, num_buffers=1):
        super().__init__(size)
        self.buffers = [np.zeros(8, dtype=np.float32) for _ in range(num_buffers)]

    def __getitem__(self, index):
        buffer = self.buffers[index % len(self.buffers)]
        buffer[:] = index
        return buffer, index


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_buffers", [1, 2])
def test_a_dataset_that_reuses_its_buffer(num_workers, num_buffers):
    """DataLoader gives the last sample in every row."""
    for x, y in Loader(Reusing(16, num_buffers), batch_size=4, num_workers=num_workers):
        assert x[:, 3].tolist() == y.tolist()
