"""Randomness by the sample's place: whoever makes a sample, and whenever, its draws are the same.

Runs in each worker (and in the trainer with 0 workers), in the thread that fetches; nothing blocks. Seeding each sample
costs 5 us per generator, which tiny samples cannot pay; so nothing is seeded until something is drawn:

    run(work) --> work() with nothing seeded --> no generator has moved --> the result
                                             '-> some have moved: forget the result, seed these by sample from now on,
                                                 and work() again

Looking whether a generator has moved costs 2 us for all three. A dataset that draws makes one task twice (four at most)
per worker and phase; one that draws nothing is never seeded. "Moved" covers each way of drawing or seeding through
``random``, ``numpy.random`` and torch's default CPU generator, cached normals included, but no generator that a dataset
owns.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.utils.data._utils import HAS_NUMPY
from torch.utils.data._utils.worker import _generate_state

from headrace.core.seeds import ROW_OF_COLLATE, Stream, batch_key, row_key
from headrace.loader.generators import (
    Generator,
    Mixer,
    NumpyBits,
    NumpyGenerator,
    PythonGenerator,
    TorchGenerator,
)

try:
    import numpy as np
except ImportError:  # torch runs without it
    np = None  # type: ignore[assignment]

Entry = tuple[Stream, Generator]
T = TypeVar("T")


class Generators:
    """What one fetching thread may draw from. One thread at a time.

    Args:
        entries: Each generator with the stream that it is seeded from.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self._reads = [generator.state for _, generator in entries]

    @classmethod
    def of_process(cls, rng: PlaceRng | None = None) -> Generators:
        """The global generators of this process, and a worker's own ones where it has such."""
        mixer = Mixer()
        entries: list[Entry] = [(Stream.PYTHON, PythonGenerator()), (Stream.TORCH, TorchGenerator(mixer))]
        if HAS_NUMPY:
            entries.append((Stream.NUMPY, NumpyGenerator(mixer)))
        return cls(entries + (rng.entries if rng is not None else []))

    @classmethod
    def of_thread(cls, rng: PlaceRng) -> Generators:
        """Only a worker's own generators: the global ones belong to all threads of the process."""
        return cls(list(rng.entries))

    def states(self) -> list[object]:
        """All states, to compare and to restore (2 us)."""
        return [read() for read in self._reads]

    def restore(self, states: list[object]) -> None:
        """Put back what ``states`` returned; generators that have not moved are not touched."""
        for (_, generator), state in zip(self.entries, states, strict=True):
            if generator.state() != state:
                generator.restore(state)


class PlaceRng:
    """``get_worker_info().rng``: generators of this worker's own, each seeded by the sample's place once it was used.

    The objects stay the same, so that a dataset may keep them. The attributes are those of torch's ``_RNG``.
    """

    def __init__(self) -> None:
        mixer = Mixer()
        self._python = _Own(lambda: PythonGenerator(random.Random(0)))
        self._torch = _Own(lambda: TorchGenerator(mixer, torch.Generator()))
        self._numpy = _Own(lambda: NumpyBits(mixer))
        self.entries: list[Entry] = [(Stream.OWN_PYTHON, self._python), (Stream.OWN_TORCH, self._torch)]
        if HAS_NUMPY:
            self.entries.append((Stream.OWN_NUMPY, self._numpy))

    @property
    def random_generator(self) -> random.Random:
        """A ``random.Random``."""
        return cast("random.Random", self._python.use().generator)

    @property
    def torch_generator(self) -> torch.Generator:
        """A CPU ``torch.Generator``."""
        return cast("torch.Generator", self._torch.use().generator)

    @property
    def numpy_generator(self) -> Any:
        """A ``numpy.random.Generator`` over MT19937; None without numpy."""
        return self._numpy.use().generator if HAS_NUMPY else None


class _Own:
    """A generator that is made when it is first used; "moved" means that this has happened."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def use(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made

    def state(self) -> object:
        return self._made is not None

    def restore(self, state: object) -> None:
        """Nothing: it belongs to no one but the dataset."""

    def seed(self, key: int) -> None:
        self.use().seed(key)


class _AgainError(BaseException):
    """Samples drew from a generator that was not seeded: collating them would be in vain."""


class PlaceSeeder:
    """Sees whether a dataset draws, and seeds by place what it draws from.

    Args:
        base_seed: As drawn by the trainer; may be set anew for a pass.
        generators: Those of this process or thread.
        is_alone: Nobody draws between two runs (a worker, as opposed to the trainer): one look at the states per run
            then does. If somebody does draw, samples are seeded in vain; never is a draw missed.
    """

    def __init__(self, base_seed: int, generators: Generators, *, is_alone: bool = False) -> None:
        self.base_seed = base_seed
        self._is_alone = is_alone
        #: Whether ``sample`` has anything to do; a loop over tiny samples need not call it otherwise.
        self.seeds_samples = False
        self._generators = generators
        # What samples draw from and what collating draws from: seeded by place from the first draw on.
        self._by_sample: list[Entry] = []
        self._by_collate: list[Entry] = []
        # The phase of the work that runs now: what is seeded in it, how much of that since its start, and all states.
        self._key, self._seeded, self._num_seeded = 0, self._by_sample, 0
        self._states: list[object] = []
        self._is_running = False

    def run(self, epoch: int, batch: int, work: Callable[[], T]) -> T:
        """Make a batch or a part of one, again if it drew from a generator that was not seeded for it.

        ``work`` calls ``sample(row)`` before each sample if ``seeds_samples`` is set when it starts, and ``collate()``
        before a ``collate_fn`` that may draw. It may hold another ``run`` (a part, made between two samples).

        Args:
            epoch: Number of the pass.
            batch: Number of the batch.
            work: What makes it; called more than once only while generators are found that were not seeded before.

        Returns:
            What ``work`` returned, or raises what it raised, in the run in which all draws followed the place.
        """
        outer = self._key, self._seeded, self._num_seeded, self._states, self._is_running
        known = self._states if self._is_alone and not self._is_running else None
        self._key, self._is_running = batch_key(self.base_seed, epoch, batch), True
        try:
            while True:
                self._begin(self._by_sample, known or self._generators.states())
                known = None
                try:
                    result = work()
                except _AgainError:
                    continue
                except Exception:
                    if self._is_settled():
                        raise
                    continue
                if self._is_settled():
                    return result
        finally:
            states = self._states
            self._key, self._seeded, self._num_seeded, self._states, self._is_running = outer
            if not self._is_running:
                self._states = states

    def sample(self, row: int) -> None:
        """The sample of this row is made next (``ROW_OF_BATCH``: all of a batch in one call)."""
        for stream, generator in self._by_sample:
            generator.seed(row_key(self._key, row, stream))

    def look(self) -> None:
        """Between two samples: start over at once, not after the whole batch, if an unseeded generator has moved."""
        if not self._is_settled():
            raise _AgainError

    def collate(self) -> None:
        """The samples are collated next: what is drawn from here on follows the batch's place."""
        if not self._is_settled():
            raise _AgainError
        for stream, generator in self._by_collate:
            generator.seed(row_key(self._key, ROW_OF_COLLATE, stream))
        self._begin(self._by_collate, self._generators.states() if self._by_collate else self._states)

    def _begin(self, seeded: list[Entry], states: list[object]) -> None:
        self._seeded, self._num_seeded, self._states = seeded, len(seeded), states

    def _is_settled(self) -> bool:
        """Whether only generators have moved that were seeded from the start of this phase; the others are from now on.

        A part that was made between two samples may have found one, which this batch may have used before.
        """
        before, self._states = self._states, self._generators.states()
        if before != self._states:
            for entry, old, new in zip(self._generators.entries, before, self._states, strict=True):
                if old != new and entry not in self._seeded:
                    self._seeded.append(entry)
            self.seeds_samples = bool(self._by_sample)
        return len(self._seeded) == self._num_seeded


def seed_worker(base_seed: int, worker: int) -> int:
    """Seed the global generators of a new worker exactly as DataLoader does.

    Returns:
        What ``get_worker_info().seed`` says, and ``torch.initial_seed()``.
    """
    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    if HAS_NUMPY:
        np.random.seed(_generate_state(base_seed, worker))  # type: ignore[no-untyped-call]  # torch's own
    return seed
