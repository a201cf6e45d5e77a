"""``headrace.Loader``: what takes DataLoader's place."""

from __future__ import annotations

import copy
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from headrace.errors import UsageError
from headrace.loader.device import cpu_by_default, is_default_device_cpu
from headrace.loader.iterator import LoaderIter
from headrace.loader.resume import ResumeBook
from headrace.loader.ring import Ring, Shelf, default_budget_bytes
from headrace.loader.single import SingleIter
from headrace.options import read_settings

T = TypeVar("T", covariant=True)


class Loader(DataLoader[T]):
    """``torch.utils.data.DataLoader`` on recycled shared memory: the same arguments, the same batches, faster.

    Args:
        dataset: As for DataLoader, and so are all arguments up to ``in_order``.
        batch_size: See there.
        shuffle: See there.
        sampler: See there.
        batch_sampler: See there.
        num_workers: See there.
        collate_fn: See there.
        pin_memory: See there.
        drop_last: See there.
        timeout: See there.
        worker_init_fn: See there.
        multiprocessing_context: See there.
        generator: See there.
        prefetch_factor: See there.
        persistent_workers: See there.
        pin_memory_device: See there.
        in_order: See there.
        workers_as: ``"process"``; ``"thread"``; ``"auto"``: threads where the interpreter has no global lock.
        seeds: ``"place"``: what a map-style dataset draws follows from the sample's place in the epoch, whatever the
            number of workers. ``"torch"``: DataLoader's own draws, per worker.
        memory_limit: Bytes that the slots may take together; None: a share of what is free.
        task_rows: Rows in each part of an awaited batch that others help with; None: even shares.
        on_worker_death: ``"restart"``: a dead worker is replaced and its batch made again; ``"raise"``: an error, as
            with DataLoader. The environment variable ``HEADRACE_ON_WORKER_DEATH`` is the default.
        read_ahead_epochs: Begin the next pass while this one ends. Draws from the generators early, and does not see
            a ``set_epoch()`` between the passes.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers_as: Literal["process", "thread", "auto"] = "process",
        seeds: Literal["place", "torch"] = "place",
        memory_limit: int | None = None,
        task_rows: int | None = None,
        on_worker_death: Literal["restart", "raise"] | None = None,
        read_ahead_epochs: bool = False,
    ) -> None:
        if on_worker_death is None:
            on_worker_death = read_settings(os.environ).on_worker_death
        _check("workers_as", workers_as, ("process", "thread", "auto"))
        _check("seeds", seeds, ("place", "torch"))
        _check("on_worker_death", on_worker_death, ("restart", "raise"))
        if workers_as == "thread" and seeds == "torch":
            raise UsageError('seeds="torch" needs workers_as="process": threads share the generators of the trainer')
        _check_positive("memory_limit", memory_limit)
        _check_positive("task_rows", task_rows)
        self.workers_as, self.seeds, self.memory_limit, self.task_rows = workers_as, seeds, memory_limit, task_rows
        self.on_worker_death, self.read_ahead_epochs = on_worker_death, read_ahead_epochs
        self._open()
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )

    def _open(self) -> None:
        self._shelf = Shelf()
        self._book = ResumeBook()
        #: Whether the program's default device is another than the CPU.
        self._is_off_cpu = False
        #: Those that have a pool: not the user's handles on a persistent pool's passes.
        self._iterators: weakref.WeakSet[LoaderIter] = weakref.WeakSet()
        weakref.finalize(self, self._shelf.close)

    def _uses_threads(self) -> bool:
        if self.workers_as == "auto":
            return not getattr(sys, "_is_gil_enabled", lambda: True)()
        return self.workers_as == "thread"

    def _take_ring(self) -> Ring:
        """Slots for a new pool: those of the last one, where it has ended."""
        return self._shelf.take() or Ring(default_budget_bytes(self.memory_limit))

    # -- iterating ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> _BaseDataLoaderIter:
        self._is_off_cpu = not is_default_device_cpu()
        with cpu_by_default():
            return self._iterate()

    def _iterate(self) -> _BaseDataLoaderIter:
        if not (self.persistent_workers and self.num_workers > 0):
            return super().__iter__()
        face = self._iterator
        if isinstance(face, LoaderIter):
            if face._pool.was_interrupted:
                face._shutdown_workers()
            if face._shutdown:  # by _shutdown_workers(), or since a worker died
                self._iterator = None
            elif self._dataset_kind == _DatasetKind.Iterable and face._is_busy:
                return LoaderIter(self, is_persistent=False)  # two passes cannot share a worker's stream
        face = super().__iter__()
        return face._hand_out() if isinstance(face, LoaderIter) else face

    def _get_iterator(self) -> _BaseDataLoaderIter:
        self._is_off_cpu |= not is_default_device_cpu()
        with cpu_by_default():
            if self.num_workers == 0:
                return SingleIter(self)
            self.check_worker_number_rationality()
            iterator = LoaderIter(self)
        self._iterators.add(iterator)
        return iterator

    def resize(self, num_workers: int | None = None, prefetch: int | None = None) -> None:
        """Change the number of workers and the depth, also in the middle of a pass, within a few batches.

        No batch is lost, repeated, reordered or changed; with ``seeds="place"`` neither are random draws.

        Args:
            num_workers: From 1 on; None: as it is.
            prefetch: Batches ahead per worker (``prefetch_factor``), from 1 on; None: as it is.

        Raises:
            UsageError: The dataset is iterable, its streams belong to their workers; or there are no workers.
        """
        _check_positive("num_workers", num_workers)
        _check_positive("prefetch", prefetch)
        if self._dataset_kind == _DatasetKind.Iterable:
            raise UsageError("an iterable dataset cannot be resized: each worker has a stream of its own")
        if self.num_workers == 0:
            raise UsageError("a loader without workers cannot be resized; make it with num_workers=1 or more")
        self.num_workers = self.num_workers if num_workers is None else num_workers
        self.prefetch_factor = self.prefetch_factor if prefetch is None else prefetch
        assert self.prefetch_factor is not None
        for iterator in list(self._iterators):
            iterator._resize(self.num_workers, self.prefetch_factor)

    # -- resuming -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: small, made at once, plain data. Batches that were delivered are behind it.

        An iterable dataset stands where its own ``state_dict()`` says, which is asked without workers only.
        """
        state = self._book.state_dict(self)
        if (
            self._dataset_kind == _DatasetKind.Iterable
            and self.num_workers == 0
            and hasattr(self.dataset, "state_dict")
        ):
            state["dataset"] = copy.deepcopy(self.dataset.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where ``state`` was made; with any number of workers.

        Raises:
            UsageError: It is no state of a Loader, or of one over other data; or it is from the middle of a stream
                that cannot be taken up again.
        """
        if self._dataset_kind == _DatasetKind.Iterable and isinstance(state, dict):
            self._load_stream(state)
        self._book.load_state_dict(self, state)
        if isinstance(self._iterator, LoaderIter):
            self._iterator._shutdown_workers()  # they draw by another base seed

    def _load_stream(self, state: dict[str, Any]) -> None:
        dataset: Any = self.dataset
        if "dataset" in state and self.num_workers == 0 and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        elif state.get("is_midway") and state.get("next_batch"):
            raise UsageError(
                "an iterable dataset can be resumed in the middle of a pass only with num_workers=0 and with "
                "state_dict() and load_state_dict() of its own: begin a new pass, or let the dataset skip what was read"
            )

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have the settings, and start workers of their own."""
        state = self.__dict__.copy()
        del state["_shelf"], state["_iterators"], state["_book"]
        state["_iterator"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _check(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} must be one of {', '.join(map(repr, known))}, was {value!r}")


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{name} must be 1 or more, or None, was {value!r}")
