"""A pass goes on where its state was made: same order and seeds, no sample fetched twice, generators as undisturbed."""

import json
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from headrace.errors import UsageError
from headrace.loader.resume import ResumeBook

pytestmark = pytest.mark.usefixtures("keep_generators")


class Host:
    """Iterates as a Loader does: DataLoader draws, the book is asked, and ``ahead`` batches are drawn early."""

    def __init__(self, loader, ahead=0, asks_twice=False):
        self.loader, self.book, self.ahead, self.asks_twice = loader, ResumeBook(), ahead, asks_twice
        self.base_seed = None

    def __iter__(self):
        start = self.book.begin(self.loader)
        indices = iter(self.loader._index_sampler)
        self.base_seed = torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator).item()
        if self.asks_twice:  # as the iterator with workers does
            indices = iter(self.loader._index_sampler)
        start.base_seed = self.base_seed = self.base_seed if start.base_seed is None else start.base_seed
        opened = start.open(indices)
        return self._deliver(start, opened)

    def _deliver(self, start, opened):
        place = [start.first_batch]
        start.progress = lambda: (place[0], ())
        queue = []
        for index in opened:
            queue.append(index)
            if len(queue) > self.ahead:
                place[0] += 1
                yield start.epoch, self.base_seed, queue.pop(0)
        while queue:
            place[0] += 1
            yield start.epoch, self.base_seed, queue.pop(0)
        start.end()


class Eager:
    """Draws when it is asked for an iterator, from each of the global generators."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(self.draw(12))


class Lazy(Eager):
    def __iter__(self):
        yield from self.draw(12)


class Stateful:
    """Has a state of its own: each pass begins where the last one ended."""

    def __init__(self):
        self.at = 0

    def __len__(self):
        return 12

    def __iter__(self):
        start = self.at
        self.at += 12
        yield from (5 * (start + step) % 36 for step in range(12))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def _shuffled(count):
    items = list(range(count))
    random.shuffle(items)
    return items


DRAWS = {
    "torch": lambda n: torch.randperm(n).tolist(),
    "random": _shuffled,
    "numpy": lambda n: np.random.permutation(n).tolist(),
}


def make(kind):
    data = list(range(12))
    generator = torch.Generator().manual_seed(31)
    return {
        "sequential": lambda: DataLoader(data, batch_size=2),
        "shuffle": lambda: DataLoader(data, batch_size=2, shuffle=True),
        "shuffle with a generator": lambda: DataLoader(data, batch_size=2, shuffle=True, generator=generator),
        "sampler with a generator": lambda: DataLoader(data, 2, sampler=RandomSampler(data, generator=generator)),
        "with replacement": lambda: DataLoader(data, 2, sampler=RandomSampler(data, replacement=True, num_samples=70)),
        "weighted": lambda: DataLoader(data, 2, sampler=WeightedRandomSampler([1.0] * 12, 12)),
        "batch_sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, drop_last=False)),
        "no batches": lambda: DataLoader(data, batch_size=None, sampler=RandomSampler(data)),
        "stateful": lambda: DataLoader(data, 2, sampler=Stateful()),
        **{f"eager {name}": lambda draw=draw: DataLoader(data, 2, sampler=Eager(draw)) for name, draw in DRAWS.items()},
        **{f"lazy {name}": lambda draw=draw: DataLoader(data, 2, sampler=Lazy(draw)) for name, draw in DRAWS.items()},
    }[kind]()


KINDS = [
    "sequential",
    "shuffle",
    "shuffle with a generator",
    "sampler with a generator",
    "with replacement",
    "weighted",
    "batch_sampler",
    "no batches",
    "stateful",
    *(f"{when} {name}" for when in ("eager", "lazy") for name in DRAWS),
]


def _seed(number):
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


def _train():
    """A step that draws from all generators, as dropout does."""
    torch.rand(3), random.random(), np.random.rand()


def _globals():
    return random.random(), np.random.rand(), float(torch.rand(()))


def _undisturbed(kind):
    _seed(7)
    host = Host(make(kind), 3, True)
    passes = []
    for _ in range(3):
        passes.append([])
        for item in host:
            passes[-1].append(item)
            _train()
    return passes, float(torch.rand(()))


@pytest.mark.parametrize("where", [(0, 0), (0, 1), (1, 0), (1, 3), (1, 4), (1, "last"), (1, "over"), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_as_if_nothing_had_happened(kind, where):
    """Saved anywhere, loaded with another depth: the remaining batches, seeds and passes are equal."""
    expected, final_torch = _undisturbed(kind)
    _seed(7)
    host, state, seen = Host(make(kind), 3, True), None, []
    stop_pass, stop_batch = where
    if stop_batch == 4 and len(host.loader) == 3:
        stop_batch = "last"
    for number in range(stop_pass + 1):
        if number == stop_pass and stop_batch == 0:
            state = host.book.state_dict(host.loader)
            break
        for delivered, item in enumerate(host, 1):
            seen.append(item)
            _train()
            is_last = delivered == len(host.loader)
            if number == stop_pass and (delivered == stop_batch or (stop_batch == "last" and is_last)):
                state = host.book.state_dict(host.loader)
                break
        if number == stop_pass and stop_batch == "over":
            state = host.book.state_dict(host.loader)
    state = pickle.loads(pickle.dumps(state))
    _seed(1000)
    resumed = Host(make(kind), 1, True)
    resumed.book.load_state_dict(resumed.loader, state)
    assert resumed.book.state_dict(resumed.loader) == state, "loading and saving again changes nothing"
    rest = []
    for _ in range(stop_pass + (stop_batch == "over"), 3):
        for item in resumed:
            rest.append(item)
            _train()
    assert seen + rest == [item for items in expected for item in items]
    assert float(torch.rand(())) == final_torch


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_small_and_plain(kind):
    host = Host(make(kind), 2)
    next(iter(host))
    state = host.book.state_dict(host.loader)
    assert len(json.dumps(state)) < 22_000
    assert state["is_midway"]
    assert state["next_batch"] == 1


def test_a_state_passes_torch_load_with_weights_only(tmp_path):
    host = Host(make("lazy numpy"), 2)
    next(iter(host))
    state = host.book.state_dict(host.loader)
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state


def test_the_programs_own_restoring_wins():
    """Who restores the generators after loading finds them so after iter()."""
    _seed(7)
    host = Host(make("shuffle"))
    items = iter(host)
    next(items)
    state = host.book.state_dict(host.loader)
    resumed = Host(make("shuffle"))
    resumed.book.load_state_dict(resumed.loader, state)
    _seed(5)
    expected = _globals()
    _seed(5)
    next(iter(resumed))
    assert _globals() == expected


def test_a_distributed_sampler_keeps_its_epoch():
    data = list(range(24))

    def loader():
        return DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3))

    host = Host(loader(), 2)
    host.loader.sampler.set_epoch(4)
    items = iter(host)
    seen = [next(items), next(items)]
    state = host.book.state_dict(host.loader)
    rest = list(items)
    resumed = Host(loader())
    resumed.book.load_state_dict(resumed.loader, state)
    assert resumed.loader.sampler.epoch == 4
    assert list(resumed) == rest
    assert len(seen + rest) == 6


def test_the_epoch_counts_passes_and_goes_on():
    host = Host(make("sequential"))
    assert [epoch for _ in range(3) for epoch, _, _ in list(host)[:1]] == [0, 1, 2]
    resumed = Host(make("sequential"))
    resumed.book.load_state_dict(resumed.loader, host.book.state_dict(host.loader))
    assert next(iter(resumed))[0] == 3


def test_batches_delivered_out_of_order_are_named():
    host = Host(make("sequential"))
    start = host.book.begin(host.loader)
    list(start.open(iter(host.loader._index_sampler)))
    start.progress = lambda: (2, (3, 5))
    state = host.book.state_dict(host.loader)
    resumed = Host(make("sequential"))
    resumed.book.load_state_dict(resumed.loader, state)
    start = resumed.book.begin(resumed.loader)
    assert (start.first_batch, start.skip) == (2, (3, 5))
    assert next(start.open(iter(resumed.loader._index_sampler))) == [4, 5]


def test_a_pass_left_early_can_be_resumed_until_the_next_begins():
    host = Host(make("sequential"))
    for _ in host:
        break
    assert host.book.state_dict(host.loader)["next_batch"] == 1
    iter(host)
    assert host.book.state_dict(host.loader)["epoch"] == 1


def test_wrong_states_are_refused_in_words():
    host = Host(make("sequential"))
    next(iter(host))
    state = host.book.state_dict(host.loader)
    with pytest.raises(UsageError, match=r"no state of a headrace\.Loader"):
        host.book.load_state_dict(host.loader, {"epoch": 3})
    with pytest.raises(UsageError, match="update it"):
        host.book.load_state_dict(host.loader, state | {"headrace_loader": 99})
    other = Host(DataLoader(range(12), batch_size=3))
    with pytest.raises(UsageError, match="pass over 6 batches, and this loader has 4"):
        other.book.load_state_dict(other.loader, state)


def test_nothing_here_keeps_a_loader_alive():
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        loader = make("shuffle")
        loader.book = ResumeBook()
        start = loader.book.begin(loader)
        next(start.open(iter(loader._index_sampler)))
        gone = weakref.ref(loader)
        del loader, start
        assert gone() is None
    finally:
        gc.enable()
