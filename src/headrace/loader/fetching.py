"""What a worker asks of the dataset for one task: rows one by one, a batch in one call, or the next of a stream.

The three kinds, chosen once per worker by ``source_of``:

    RowSource     map-style, one ``dataset[index]`` per row; the only kind whose rows can be given to others
    WholeSource   ``__getitems__``, ``TensorDataset``, or ``batch_size=None``: one call per batch
    StreamSource  iterable datasets, with DataLoader's rules for the end of the stream
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from headrace.loader.control import BELL, ROW
from headrace.loader.reuse import ReuseProbe, copied, has_changed


class Exhausted(Exception):  # noqa: N818 - no error: what StopIteration means, where a dataset's own must not be mistaken for it
    """The stream of an iterable dataset has ended."""


class RowSource:
    """Samples one by one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.probe = ReuseProbe()

    def rows(
        self,
        samples: list[Any],
        index: Sequence[Any],
        begin: int,
        end: int,
        line: Any,
        bell: int,
        seed: Callable[[int], None] | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Append the samples of rows ``begin`` to ``end`` - 1; stop early, between two, when the bell rings.

        Args:
            samples: Where they go.
            index: What the sampler gave for the batch.
            begin: First row.
            end: One past the last.
            line: The worker's control line; each row is noted there before the dataset is asked.
            bell: The bell's value that the worker has seen last.
            seed: Called with each row before its sample is made.
            look: Called after the first sample while little is known about the dataset.
        """
        dataset = self._dataset
        if seed is not None or self.probe.is_probing or self.probe.copies:
            self._careful_rows(samples, index, begin, end, line, bell, seed, look)
            return
        for row in range(begin, end):
            line[ROW] = row + 1
            samples.append(dataset[index[row]])
            if line[BELL] != bell:
                return

    def _careful_rows(
        self,
        samples: list[Any],
        index: Sequence[Any],
        begin: int,
        end: int,
        line: Any,
        bell: int,
        seed: Callable[[int], None] | None,
        look: Callable[[], None] | None,
    ) -> None:
        dataset, probe = self._dataset, self.probe
        for row in range(begin, end):
            line[ROW] = row + 1
            if seed is not None:
                seed(row)
            sample = dataset[index[row]]
            if probe.copies:
                sample = copied(sample)
            elif probe.is_probing:
                probe.keep(sample)
                if row == begin and look is not None:
                    look()
            samples.append(sample)
            if line[BELL] != bell:
                return


class WholeSource:
    """The whole batch, or with ``batch_size=None`` what the dataset gives for one index."""

    def __init__(self, dataset: Any, *, auto_collation: bool) -> None:
        self._dataset, self._auto_collation = dataset, auto_collation

    def fetch(self, index: Any) -> Any:
        """Samples for ``collate_fn``."""
        return self._dataset.__getitems__(index) if self._auto_collation else self._dataset[index]


class GatherSource:
    """A ``TensorDataset``: the collated batch with one ``index_select`` per tensor, and no sample in between."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def fetch(self, index: Sequence[Any]) -> list[torch.Tensor]:
        """What ``default_collate`` makes of the samples."""
        tensors = self._dataset.tensors
        try:
            rows = torch.tensor(index, dtype=torch.int64)
            if int(rows.min()) < 0:  # index_select takes no negative numbers, and a dataset does
                rows = torch.where(rows < 0, rows + len(tensors[0]), rows)
            return [tensor.index_select(0, rows) for tensor in tensors]
        except (IndexError, RuntimeError, TypeError, ValueError):  # no row numbers: the dataset's own words, or its way
            return default_collate([self._dataset[row] for row in index])  # type: ignore[no-any-return]  # untyped


class StreamSource:
    """An iterable dataset in one pass."""

    def __init__(self, dataset: Any, *, auto_collation: bool, drop_last: bool) -> None:
        self._iterator: Iterator[Any] = iter(dataset)
        self._auto_collation, self._drop_last = auto_collation, drop_last
        self._is_over = False
        self._is_probing, self._copies = True, False
        self._kept: list[Any] = []

    def fetch(self, index: Any) -> Any:
        """Samples for ``collate_fn``: a list, or with ``batch_size=None`` the next one.

        Raises:
            Exhausted: There is nothing more, or too little for a batch with ``drop_last``.
        """
        if self._is_over:
            raise Exhausted
        if not self._auto_collation:
            return self._take()
        samples: list[Any] = []
        for _ in index:
            try:
                samples.append(copied(self._take()) if self._copies else self._take())
            except Exhausted:
                break
            if self._is_probing:
                self._kept.append(copied(samples[-1]))
        if not samples or (self._drop_last and len(samples) < len(index)):
            raise Exhausted
        return self._probed(samples) if self._is_probing else samples

    def _probed(self, samples: list[Any]) -> list[Any]:
        """The first batch; from its copies where the dataset has used one buffer for all of it (see ``reuse``)."""
        kept, self._kept, self._is_probing = self._kept, [], False
        self._copies = any(has_changed(sample, copy) for sample, copy in zip(samples, kept, strict=True))
        return kept if self._copies else samples

    def _take(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._is_over = True
            raise Exhausted from None


Source = RowSource | WholeSource | GatherSource


def source_of(dataset: Any, collate_fn: Any, *, auto_collation: bool) -> Source:
    """How to ask a map-style dataset."""
    if not auto_collation:
        return WholeSource(dataset, auto_collation=False)
    if collate_fn is default_collate and can_gather(dataset):
        return GatherSource(dataset)
    if getattr(dataset, "__getitems__", None):
        return WholeSource(dataset, auto_collation=True)
    return RowSource(dataset)


def can_gather(dataset: Any) -> bool:
    """Whether the batch of a dataset is rows of plain tensors in memory."""
    if type(dataset) is not TensorDataset:
        return False
    return all(
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        for tensor in dataset.tensors
    )
