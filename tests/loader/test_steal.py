"""Others help with a batch that the trainer has waited for; its values are the same."""

import time

import pytest
import torch

from headrace import Loader
from tests.loader.datasets import Slow

#: Of this machine's cores, which are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

#: Eight slow samples in one batch: half a second and more alone.
SECONDS = dict.fromkeys(range(8, 16), 0.08)


def run(**options):
    torch.manual_seed(2)
    loader = Loader(Slow(64, SECONDS), batch_size=16, **options)
    began, found = time.monotonic(), []
    for index, drawn, x in loader:
        assert (x == index.view(-1, 1)).all()
        found.append((index.tolist(), drawn.tolist()))
    return found, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("task_rows", [None, 1])
def test_slow_rows_are_shared(task_rows):
    """The same batches, in less time."""
    want, _ = run(num_workers=0)
    got, took_s = run(num_workers=4, task_rows=task_rows)
    assert got == want
    assert took_s < 0.08 * 8


@pytest.mark.slow
def test_batches_of_streams_seeds_of_workers_and_custom_collates_are_whole():
    """Where the worker matters, nobody else makes its rows."""
    loader = Loader(Slow(32, SECONDS), batch_size=16, num_workers=2, seeds="torch")
    assert not iter(loader)._can_steal
    loader = Loader(Slow(32, SECONDS), batch_size=16, num_workers=2, collate_fn=lambda items: items)
    assert not iter(loader)._can_steal
