"""Iterable datasets: DataLoader's sharding, ends of streams, and lengths."""

import warnings

import pytest
from torch.utils.data import DataLoader, IterableDataset

from headrace import Loader
from headrace.errors import UsageError
from tests.loader.datasets import Stream

#: Of this machine's cores, which are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("in_order", [True, False])
def test_uneven_streams_come_as_with_dataloader(batch_size, drop_last, in_order):
    """Round robin over the workers, then over those that have more; out of order, the same batches."""
    if batch_size is None and drop_last:
        pytest.skip("no such combination")
    options = {"batch_size": batch_size, "num_workers": 3, "drop_last": drop_last}
    want = [str(batch) for batch in DataLoader(Stream((2, 7, 4)), **options)]
    loader = Loader(Stream((2, 7, 4)), **options, in_order=in_order, persistent_workers=True)
    for _ in range(2):
        got = [str(batch) for batch in loader]
        assert (got if in_order else sorted(got)) == (want if in_order else sorted(want))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_that_was_left_does_not_show_in_the_next(persistent):
    """Each pass asks the dataset for a new stream."""
    loader = Loader(Stream((6, 6)), batch_size=2, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        assert next(iter(loader)).tolist() == [0, 1]
    assert [batch.tolist() for batch in loader] == [[0, 1], [100, 101], [2, 3], [102, 103], [4, 5], [104, 105]]


def test_two_passes_at_a_time_are_independent():
    """The second one gets workers of its own."""
    loader = Loader(Stream((4,)), batch_size=2, num_workers=1, persistent_workers=True)
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [([0, 1],) * 2, ([2, 3],) * 2]


class Sized(IterableDataset):
    def __iter__(self):
        return iter(range(6))

    def __len__(self):
        return 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_more_than_the_length_is_warned_of(num_workers):
    """As DataLoader does, and only after ``len(loader)`` was asked for."""
    loader = Loader(Sized(), num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
    assert len(loader) == 3
    with pytest.warns(UserWarning, match="was reported to be 3"):
        list(loader)


def collect(loader):
    """The values of a pass until it ends or fails, and the error."""
    got = []
    try:
        for batch in loader:
            got += batch.tolist()
    except Exception as error:
        return got, error
    return got, None


class Broken(IterableDataset):
    def __iter__(self):
        yield from (0, 1, 2, 3)
        raise OSError("tar header is truncated")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_streams_error_comes_after_its_items(num_workers):
    """With its own type."""
    got, error = collect(Loader(Broken(), batch_size=2, num_workers=num_workers))
    assert got == [0, 1, 2, 3]
    assert isinstance(error, OSError)
    assert "tar header is truncated" in str(error)


class Counting(IterableDataset):
    """Knows where it stands."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 10:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_stream_is_resumed_by_its_own_state():
    """Where it has one, and no workers; otherwise that is said."""
    loader = Loader(Counting(), batch_size=2)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    other = Loader(Counting(), batch_size=2)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [[5, 6], [7, 8], [9, 10]]
    with pytest.raises(UsageError, match="num_workers=0"):
        Loader(Counting(), batch_size=2, num_workers=1).load_state_dict(state)
