"""Iterating without workers: DataLoader's own iterator, with draws that follow the sample's place.

Under ``seeds="place"`` a map-style dataset draws what it would draw in a worker, and the trainer's generators are put
back after each batch, so that the number of workers changes nothing.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate, default_convert
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from headrace.core.seeds import ROW_OF_BATCH
from headrace.loader.device import cpu_by_default, pinned
from headrace.loader.fetching import RowSource, source_of
from headrace.loader.seeding import Generators, PlaceSeeder

if TYPE_CHECKING:
    from headrace.loader.loader import Loader


class SingleIter(_SingleProcessDataLoaderIter):
    """One pass in the trainer's own thread."""

    def __init__(self, loader: Loader[Any]) -> None:
        self._is_off_cpu = loader._is_off_cpu
        start = self._start = loader._book.begin(loader)
        super().__init__(loader)
        if start.base_seed is None:
            start.base_seed = int(self._base_seed)
        self._sampler_iter = start.open(self._sampler_iter)
        self._is_placed = loader.seeds == "place" and self._dataset_kind == _DatasetKind.Map
        self._batches = itertools.count(start.first_batch)
        where = self._where = [start.first_batch]
        start.progress = lambda: (where[0], ())
        self._skip = set(start.skip)
        if self._is_placed:
            self._generators = Generators.of_process()
            self._seeder = PlaceSeeder(int(start.base_seed), self._generators)
            self._source = source_of(self._dataset, None, auto_collation=self._auto_collation)
            #: Nobody rings here.
            self._line = [0] * 8
            self._collate_draws = self._collate_fn not in (default_collate, default_convert)

    def __next__(self) -> Any:
        if self._is_off_cpu:
            with cpu_by_default():
                return super().__next__()
        return super().__next__()

    def _next_data(self) -> Any:
        try:
            index = next(self._sampler_iter)
            number = next(self._batches)
            while number in self._skip:
                index, number = next(self._sampler_iter), next(self._batches)
            data = self._place(number, index) if self._is_placed else self._dataset_fetcher.fetch(index)
        except StopIteration:
            self._start.end()
            raise
        self._where[0] = number + 1
        return pinned(data, self._pin_memory_device) if self._pin_memory else data

    def _place(self, number: int, index: Any) -> Any:
        """A batch whose draws follow its place; the trainer's generators are put back."""
        states = self._generators.states()
        try:
            return self._seeder.run(self._start.epoch, number, lambda: self._make(index))
        except StopIteration as error:  # a dataset's own must not look like the end of the pass
            raise RuntimeError("the dataset raised StopIteration for a sample") from error
        finally:
            self._generators.restore(states)

    def _make(self, index: Any) -> Any:
        seeder, source = self._seeder, self._source
        if isinstance(source, RowSource):
            samples = self._rows(source, index)
        else:
            if seeder.seeds_samples:
                seeder.sample(ROW_OF_BATCH)
            samples = source.fetch(index)
        if self._collate_draws:
            seeder.collate()
        return self._collate_fn(samples)

    def _rows(self, source: RowSource, index: Any) -> list[Any]:
        seed = self._seeder.sample if self._seeder.seeds_samples else None
        samples: list[Any] = []
        source.probe.begin()
        source.rows(samples, index, 0, len(index), self._line, 0, seed, self._seeder.look)
        if source.probe.is_probing and source.probe.end():
            samples.clear()
            source.rows(samples, index, 0, len(index), self._line, 0, seed)
        return samples
