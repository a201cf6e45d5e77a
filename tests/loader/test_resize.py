"""The number of workers and the depth change in the middle of a pass; the batches do not."""

import pytest
import torch

from headrace import Loader
from headrace.errors import UsageError
from tests.loader.datasets import Drawing, Stream, Who

#: Of this machine's cores, which are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def values(loader, at=None):
    found = []
    for number, batch in enumerate(loader):
        found.append([part.tolist() for part in batch])
        if at and number in at:
            loader.resize(**at[number])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_resizing_changes_no_batch(persistent):
    """Growing, shrinking and another depth, several times in one pass."""
    options = {"batch_size": 2, "shuffle": True, "num_workers": 2, "persistent_workers": persistent}
    torch.manual_seed(4)
    want = [values(Loader(Drawing(120), **options)) for _ in range(1)]
    torch.manual_seed(4)
    changes = {
        5: {"num_workers": 4},
        20: {"num_workers": 1, "prefetch": 3},
        40: {"num_workers": 3},
        41: {"prefetch": 1},
    }
    assert [values(Loader(Drawing(120), **options), changes)] == want


def test_new_workers_take_part_and_old_ones_leave():
    """Within a few batches; ``get_worker_info()`` tells the new number."""
    loader = Loader(Who(120), batch_size=2, num_workers=1, persistent_workers=True)
    seen = []
    for number, (_, worker, num_workers, _) in enumerate(loader):
        seen.append((worker[0].item(), num_workers[0].item()))
        if number == 4:
            loader.resize(num_workers=3)
        if number == 30:
            handles = loader._iterator._workers
            loader.resize(num_workers=2)
    assert {worker for worker, _ in seen[8:30]} == {0, 1, 2}
    assert {n for _, n in seen[15:30]} == {3}
    assert {worker for worker, _ in seen[40:]} == {0, 1}
    assert len(loader._iterator._workers) == loader.num_workers == 2
    handles[2].join(5)
    assert handles[2].exitcode == 0


def test_a_loader_at_rest_is_resized_too():
    """The next pass has the new number of workers."""
    loader = Loader(Who(12), batch_size=2, num_workers=1, persistent_workers=True)
    list(loader)
    loader.resize(num_workers=2)
    assert [batch[1][0].item() for batch in loader] == [0, 1] * 3


def test_what_cannot_be_resized_says_so():
    """Streams belong to their workers."""
    with pytest.raises(UsageError, match="iterable"):
        Loader(Stream((3,)), num_workers=1).resize(num_workers=2)
    with pytest.raises(UsageError, match="without workers"):
        Loader(range(3)).resize(num_workers=2)
    with pytest.raises(UsageError, match="num_workers must be 1 or more"):
        Loader(range(3), num_workers=1).resize(num_workers=0)
