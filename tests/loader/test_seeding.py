"""Draws follow the sample's place, whoever makes it; nothing that is not drawn from is seeded."""

import random

import numpy as np
import pytest
import torch

from headrace.core.seeds import Stream, batch_key, row_key
from headrace.loader import generators as generators_module
from headrace.loader.generators import Mixer, NumpyGenerator, PythonGenerator, TorchGenerator
from headrace.loader.seeding import Generators, PlaceRng, PlaceSeeder, seed_worker

pytestmark = pytest.mark.usefixtures("keep_generators")


def _slow_ways(monkeypatch):
    monkeypatch.setattr(generators_module, "_words_of", lambda generator: None)
    monkeypatch.setattr(generators_module, "_mt_words", lambda bits: None)
    monkeypatch.setattr(generators_module, "_find_aug_offset", lambda: None)


@pytest.fixture(params=["fast", "slow"])
def ways(request, monkeypatch):
    if request.param == "slow":
        _slow_ways(monkeypatch)
    return request.param


def _draw_words(num_words):
    return {
        "python": lambda: random.getrandbits(32 * num_words),
        "numpy": lambda: np.random.bytes(4 * num_words),
        "torch": lambda: torch.empty(num_words, dtype=torch.uint8).random_(0, 100),
    }


DRAWS = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.shuffle": lambda: random.shuffle([1, 2, 3]),
    "random.seed": lambda: random.seed(5),
    "random.setstate": lambda: random.setstate(random.Random(3).getstate()),
    "np.rand": np.random.rand,
    "np.randn": lambda: np.random.randn(2),
    "np.normal": np.random.normal,
    "np.seed": lambda: np.random.seed(5),
    "np.permutation": lambda: np.random.permutation(5),
    "torch.rand": lambda: torch.rand(()),
    "torch.randn": lambda: torch.randn(3),
    "torch.randn_large": lambda: torch.randn(100),
    "torch.randint": lambda: torch.randint(9, ()),
    "torch.manual_seed": lambda: torch.default_generator.manual_seed(5),
    "torch.dropout": lambda: torch.nn.functional.dropout(torch.ones(4), training=True),
    **{f"624 words of {name}": draw for name, draw in _draw_words(624).items()},
    **{f"1248 words of {name}": draw for name, draw in _draw_words(1248).items()},
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_way_of_drawing_is_noticed(name, ways):
    held = Generators.of_process()
    # A cached normal is a draw that moves no word: it must be noticed too.
    random.gauss(0, 1), np.random.randn(), torch.randn(())
    before = held.states()
    assert held.states() == before
    DRAWS[name]()
    assert held.states() != before


@pytest.mark.parametrize("draw", [lambda: random.gauss(0, 1), lambda: np.random.randn(), lambda: torch.randn(())])
def test_taking_a_cached_normal_is_noticed(draw, ways):
    held = Generators.of_process()
    seed_worker(1, 1)
    draw()
    before = held.states()
    draw()
    assert held.states() != before


def test_states_are_restored_exactly(ways):
    held = Generators.of_process()
    random.gauss(0, 1), np.random.randn(), torch.randn(())
    before = held.states()
    full = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for draw in DRAWS.values():
        draw()
    held.restore(before)
    assert random.getstate() == full[0]
    now = np.random.get_state()
    assert now[0] == full[1][0]
    assert np.array_equal(now[1], full[1][1])
    assert now[2:] == full[1][2:]
    assert torch.equal(torch.get_rng_state(), full[2])
    assert torch.initial_seed() == int.from_bytes(bytes(full[2][:8].tolist()), "little")


def _values():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        float(torch.rand(())),
        float(torch.randn(())),
    )


def test_the_fast_and_the_slow_way_seed_alike(monkeypatch):
    def draw_all():
        for stream, generator in Generators.of_process().entries:
            generator.seed(row_key(batch_key(2**63 + 5, 3, 70), 9, stream))
        return _values()

    fast = draw_all()
    _slow_ways(monkeypatch)
    assert draw_all() == fast


def test_seeding_by_place_never_changes(ways):
    """Results of a release stay those of the next: a resumed run must go on with the same draws."""
    for stream, generator in Generators.of_process().entries:
        generator.seed(row_key(batch_key(1, 2, 3), 4, stream))
    assert _values() == pytest.approx(EXPECTED, abs=1e-6)


EXPECTED = (
    0.12968271046477808,
    -0.1473606121414959,
    0.384199016866441,
    -0.3457879523531641,
    0.9340009093284607,
    0.5246160626411438,
)


def test_seeding_keeps_the_initial_seed():
    torch.manual_seed(77)
    TorchGenerator(Mixer()).seed(1 << 200)
    assert torch.initial_seed() == 77


def test_layouts_are_known_here():
    """The fast ways hold on this interpreter; elsewhere the slow ones serve, and this test says so."""
    mixer = Mixer()
    assert PythonGenerator()._words is not None
    assert NumpyGenerator(mixer)._words is not None
    assert TorchGenerator(mixer)._is_known


def test_another_bit_generator_of_numpy_is_followed():
    mixer = Mixer()
    held = NumpyGenerator(mixer)
    old = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        before = held.state()
        first = np.random.rand()
        assert held.state() != before
        held.restore(before)
        assert np.random.rand() == first
        held.seed(5)
        first = np.random.rand()
        held.seed(5)
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(old)
    before = held.state()
    np.random.rand()
    assert held.state() != before


def test_another_layout_of_torch_is_seeded_in_torchs_own_way():
    held = TorchGenerator(Mixer(), torch.Generator())
    held._is_known = False
    held.seed(3)
    first = torch.rand(2, generator=held.generator)
    held.seed(3)
    assert torch.equal(torch.rand(2, generator=held.generator), first)


class _Drawing:
    """A dataset whose sample ``i`` draws from what ``kinds[i % len]`` names."""

    def __init__(self, *kinds):
        self.kinds = kinds
        self.num_calls = 0

    def __getitem__(self, i):
        self.num_calls += 1
        return i, [DRAWS[name]() for name in self.kinds[i % len(self.kinds)]]


def _fetch(seeder, dataset, batch, indices, collate=None, rows=None):
    rows = rows or range(len(indices))

    def work():
        samples = []
        for row in rows:
            if seeder.seeds_samples:
                seeder.sample(row)
            samples.append(dataset[indices[row]])
        if collate is None:
            return samples
        seeder.collate()
        return collate(samples)

    return repr(seeder.run(0, batch, work))


KINDS = [
    (),
    ("random.random",),
    ("np.randn", "torch.rand"),
    ("random.gauss",),
    ("np.normal", "random.random"),
    ("torch.randn",),
]


def test_draws_do_not_depend_on_who_made_the_sample_and_when(ways):
    """One worker or three, in any order, from any state of the generators: the same values."""
    batches = [list(range(b * 4, b * 4 + 4)) for b in range(9)]

    def collate(samples):
        return samples, random.random(), [float(torch.rand(()))] * (samples[0][0] % 8 == 0)

    def one_worker(order, start):
        seed_worker(start, 0)
        seeder, dataset = PlaceSeeder(99, Generators.of_process()), _Drawing(*KINDS)
        return {b: _fetch(seeder, dataset, b, batches[b], collate) for b in order}

    whole = one_worker(range(9), 1)
    assert one_worker(reversed(range(9)), 2) == whole
    shared = {}
    for worker in range(3):
        shared.update(one_worker(range(worker, 9, 3), 10 + worker))
    assert shared == whole
    assert len(set(whole.values())) == 9


def test_parts_draw_as_the_whole_batch():
    indices = list(range(6))
    whole = _fetch(PlaceSeeder(5, Generators.of_process()), _Drawing(*KINDS), 3, indices)
    parts = [
        _fetch(PlaceSeeder(5, Generators.of_process()), _Drawing(*KINDS), 3, indices, rows=range(low, low + 2))
        for low in (0, 2, 4)
    ]
    assert "[" + ", ".join(part[1:-1] for part in parts) + "]" == whole


def test_a_part_between_two_samples_changes_nothing():
    indices = list(range(6))
    whole = _fetch(PlaceSeeder(5, Generators.of_process()), _Drawing(("random.random",)), 3, indices)
    seeder, dataset = PlaceSeeder(5, Generators.of_process()), _Drawing(("random.random",))
    has_helped = []

    def work():
        samples = []
        for row in range(6):
            if seeder.seeds_samples:
                seeder.sample(row)
            samples.append(dataset[indices[row]])
            if row == 2 and not has_helped:
                has_helped.append(_fetch(seeder, dataset, 7, indices, rows=range(2)))
        return samples

    assert repr(seeder.run(0, 3, work)) == whole
    assert has_helped == [_fetch(PlaceSeeder(5, Generators.of_process()), dataset, 7, indices, rows=range(2))]


def test_a_dataset_that_draws_nothing_is_never_seeded_nor_repeated():
    held = Generators.of_process()
    seeder, dataset = PlaceSeeder(5, held), _Drawing(())
    before = held.states()
    for batch in range(5):
        _fetch(seeder, dataset, batch, range(4), collate=len)
    assert dataset.num_calls == 20
    assert not seeder.seeds_samples
    assert held.states() == before


def test_only_what_was_drawn_from_is_seeded():
    held = Generators.of_process()
    seeder, dataset = PlaceSeeder(5, held), _Drawing(("random.random",))
    before = dict(zip((stream for stream, _ in held.entries), held.states(), strict=True))
    for batch in range(3):
        _fetch(seeder, dataset, batch, range(4))
    after = dict(zip((stream for stream, _ in held.entries), held.states(), strict=True))
    assert dataset.num_calls == 16, "one task is made twice"
    assert [stream for stream in before if before[stream] != after[stream]] == [Stream.PYTHON]


def test_an_exception_that_follows_from_a_draw_is_the_same_for_everyone():
    class Fails:
        def __getitem__(self, i):
            raise ValueError(random.random())

    def message(start):
        seed_worker(start, 0)
        seeder = PlaceSeeder(5, Generators.of_process())
        with pytest.raises(ValueError, match=r"0\.") as caught:
            _fetch(seeder, Fails(), 0, [1])
        return str(caught.value)

    assert message(1) == message(2)


def test_epochs_batches_and_rows_draw_differently():
    seeder = PlaceSeeder(5, Generators.of_process())

    def draw(epoch, batch, row):
        def work():
            seeder.sample(row)
            return random.random()

        return seeder.run(epoch, batch, work)

    values = {draw(epoch, batch, row) for epoch in range(3) for batch in range(3) for row in range(3)}
    assert len(values) == 27


def test_a_workers_own_generators_follow_the_place_even_if_kept():
    """The objects of get_worker_info().rng may be kept by the dataset; a thread and a process draw alike."""

    class Kept:
        def __init__(self, rng):
            self.rng, self.python, self.numpy, self.torch = rng, None, None, None

        def __getitem__(self, i):
            self.python = self.python or self.rng.random_generator
            self.numpy = self.numpy or self.rng.numpy_generator
            self.torch = self.torch or self.rng.torch_generator
            return (
                self.python.random(),
                float(self.numpy.random()),
                int(self.numpy.integers(99)),
                float(torch.rand((), generator=self.torch)),
            )

    def values(order, make):
        rng = PlaceRng()
        seeder = PlaceSeeder(5, make(rng))
        dataset = Kept(rng)
        return {batch: _fetch(seeder, dataset, batch, range(3)) for batch in order}

    thread = values(range(4), Generators.of_thread)
    assert values(range(4), Generators.of_process) == thread
    assert values(reversed(range(4)), Generators.of_thread) == thread
    assert len(set(thread.values())) == 4


def test_new_workers_are_seeded_as_by_dataloader():
    class Dataset(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return torch.initial_seed(), random.random(), np.random.rand(), float(torch.rand(()))

    torch.manual_seed(4)
    theirs = [
        x.item()
        for x in next(iter(torch.utils.data.DataLoader(Dataset(), num_workers=1, multiprocessing_context="fork")))
    ]
    torch.manual_seed(4)
    base_seed = torch.empty((), dtype=torch.int64).random_().item()
    assert seed_worker(base_seed, 0) == theirs[0]
    assert list(Dataset()[0]) == theirs
