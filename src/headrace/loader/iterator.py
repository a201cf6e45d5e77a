"""The iterators that a ``Loader`` with workers hands out; DataLoader's own class, by ``isinstance``.

    loader._iterator (persistent workers) --> LoaderIter: the pool's face, kept by the loader
    iter(loader) --> LoaderIter: one pass, kept by the user      (without persistent workers both are one object)

Two passes over one persistent pool are two objects, so that a nested loop, ``zip(loader, loader)`` or an old iterator
get their own batches. A pass that is dropped before its end tells the pool so from its finalizer, without a lock.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from headrace.errors import LoaderError
from headrace.loader.device import cpu_by_default, pinned
from headrace.loader.fetching import RowSource, source_of
from headrace.loader.passes import Pass
from headrace.loader.pool import SHUT_DOWN, Pool
from headrace.loader.resume import PassStart
from headrace.loader.setup import WorkerSetup
from headrace.loader.starting import start_pool

if TYPE_CHECKING:
    from headrace.loader.loader import Loader


class LoaderIter(_MultiProcessingDataLoaderIter):
    """One pass over a ``Loader`` with workers. Made and used in any thread, by one at a time."""

    _finalizer: weakref.finalize[..., Any]
    _pool: Pool
    _pass: Pass | None
    _face: LoaderIter | None = None

    def __init__(self, loader: Loader[Any], *, is_persistent: bool | None = None) -> None:
        """Start the workers and the first pass.

        Args:
            loader: Whose settings hold.
            is_persistent: Whether the workers outlive the pass; None: as the loader says.
        """
        self._book = loader._book
        self._start = self._book.begin(loader)
        _BaseDataLoaderIter.__init__(self, loader)
        if self._start.base_seed is not None:
            self._base_seed = self._start.base_seed
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        if self._num_workers <= 0:
            raise AssertionError("num_workers must be greater than 0 for MultiProcessingDataLoaderIter")
        if not self._prefetch_factor or self._prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        if is_persistent is not None:
            self._persistent_workers = is_persistent
        self._is_iterable = self._dataset_kind == torch_dataloader._DatasetKind.Iterable
        self._is_watched = _BaseDataLoaderIter.__next__.__code__.co_filename != torch_dataloader.__file__
        self._is_off_cpu = loader._is_off_cpu
        self._worker_init_fn = self._with_sharding(loader.worker_init_fn)
        self._can_steal = (
            loader.seeds == "place"
            and not self._is_iterable
            and self._collate_fn is default_collate
            and isinstance(source_of(self._dataset, default_collate, auto_collation=self._auto_collation), RowSource)
        )
        self._loader = weakref.ref(loader)
        self._task_rows = loader.task_rows
        self._reads_ahead = loader.read_ahead_epochs and self._persistent_workers and not self._is_iterable
        self._start_pool(loader)
        self._reset(loader, first_iter=True)

    def _with_sharding(self, init_fn: Any) -> Any:
        """Data pipes of torch shard themselves over ranks and workers."""
        if not isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            return init_fn
        return functools.partial(torch_dataloader._sharding_worker_init_fn, init_fn, self._world_size, self._rank)

    def _start_pool(self, loader: Loader[Any]) -> None:
        setup = WorkerSetup(
            dataset=self._dataset,
            is_iterable=self._is_iterable,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            init_fn=self._worker_init_fn,
            base_seed=int(self._base_seed),
            num_workers=self._num_workers,
            shared_seed=self._shared_seed,
            seeds=loader.seeds,
            is_thread=loader._uses_threads(),
        )
        self._pool = start_pool(
            setup,
            loader._take_ring(),
            loader.multiprocessing_context,
            is_replacing=loader.on_worker_death == "restart" and not self._is_iterable,
            on_close=loader._shelf.put,
        )
        self._finalizer = weakref.finalize(self, self._pool.close)

    # -- passes -------------------------------------------------------------------------------------------------------

    def _reset(self, loader: Loader[Any], first_iter: bool = False) -> None:
        """Begin a pass: the sampler is asked for a new iterator, as DataLoader does, and the first tasks go out."""
        pool = self._pool
        if pool.early is None and not first_iter:
            self._start = self._book.begin(loader)
        _BaseDataLoaderIter._reset(self, loader, first_iter)
        if pool.is_closed:
            self._start_pool(loader)
            pool = self._pool
        with pool.lock:
            pool.drain()
            if not first_iter and self._is_iterable:
                pool.begin_stream(self._shared_seed)
            early, pool.early = pool.early, None
            if early is None:
                self._sampler_iter = self._start.open(self._sampler_iter)
                self._pass = self._new_pass(self._start, self._sampler_iter)
            else:
                self._pass = early
                self._start = self._book._current = early.start
            self._pass.fill()

    def _new_pass(self, start: PassStart, sampler: Any) -> Pass:
        start.base_seed = int(self._base_seed)
        return Pass(
            self._pool,
            sampler,
            self._prefetch_factor,
            start=start,
            is_batched=self._auto_collation,
            in_order=self._in_order,
            timeout_s=self._timeout,
            can_steal=self._can_steal,
            task_rows=self._task_rows,
        )

    def _read_ahead(self) -> None:
        """The sampler has no more for this pass: draw for the next one, a batch for each that is delivered."""
        pool, book, loader = self._pool, self._book, self._loader()
        if loader is None:
            return
        if pool.early is None:
            current = book._current
            start = book.begin(loader)
            book._current = current  # until it is asked for, the state is this pass's
            pool.early = self._new_pass(start, start.open(iter(self._index_sampler)))
        pool.early.draw()

    def _resize(self, num_workers: int, prefetch: int) -> None:
        """Change the number of workers and the depth in the middle of passes."""
        self._num_workers, self._prefetch_factor = num_workers, prefetch
        with self._pool.lock:
            if not self._pool.is_closed:
                self._pool.resize(num_workers)
                for current in list(self._pool.passes.values()):
                    current.resize(num_workers, prefetch)

    def _hand_out(self) -> LoaderIter:
        """The iterator for the user over the pass that has just begun."""
        given = object.__new__(type(self))
        given.__dict__.update(self.__dict__)
        given._face = self  # which ends the workers when it goes: a loader may be dropped while its pass is used
        assert self._pass is not None
        given._finalizer = weakref.finalize(given, self._pool.left.append, self._pass.number)
        return given

    @property
    def _is_busy(self) -> bool:
        """Whether the last pass has neither ended nor been dropped."""
        current, pool = self._pass, self._pool
        return current is not None and current.number in pool.passes and current.number not in tuple(pool.left)

    # -- iterating ----------------------------------------------------------------------------------------------------

    def __next__(self) -> Any:
        if self._is_off_cpu:
            with cpu_by_default():
                return _BaseDataLoaderIter.__next__(self)
        if self._is_watched or torch._C._autograd._profiler_enabled():
            return _BaseDataLoaderIter.__next__(self)  # whoever has wrapped it sees this iterator too
        data = self._next_data()
        self._num_yielded += 1
        if self._is_iterable and self._IterableDataset_len_called is not None:
            self._check_length()
        return data

    def _next_data(self) -> Any:
        pool, current = self._pool, self._pass
        with pool.lock:
            if current is None:
                raise StopIteration
            if pool.is_closed:
                raise LoaderError(SHUT_DOWN)
            try:
                data = current.next()
                if self._reads_ahead and current.schedule.is_finished:
                    self._read_ahead()
            except StopIteration:
                self._end()
                raise
            except BaseException as error:
                if pool.is_broken:
                    pool.close()
                pool.was_interrupted |= isinstance(error, KeyboardInterrupt)
                raise
        return pinned(data, self._pin_memory_device) if self._pin_memory else data

    def _end(self) -> None:
        """The pass is over."""
        assert self._pass is not None
        self._pass.start.end()
        self._pool.passes.pop(self._pass.number, None)
        self._pass = None
        if not self._persistent_workers:
            self._pool.close()

    def _check_length(self) -> None:
        length = self._IterableDataset_len_called
        if length is not None and self._num_yielded > length:
            import warnings

            warnings.warn(
                f"Length of IterableDataset {self._dataset} was reported to be {length}"
                f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples.",
                stacklevel=3,
            )

    # -- what others reach for ----------------------------------------------------------------------------------------

    @property
    def _workers(self) -> list[Any]:  # type: ignore[override]  # an attribute of torch's class
        """The worker processes, as ``multiprocessing.Process`` or with its face."""
        return self._pool.handles

    @property
    def _shutdown(self) -> bool:  # type: ignore[override]  # an attribute of torch's class
        return self._pool.is_closed

    def _shutdown_workers(self) -> None:
        """End the workers now. The next ``iter(loader)`` starts new ones."""
        self._pool.close()

    def __del__(self) -> None:
        """Nothing: torch's would end persistent workers with each pass; the finalizer does what has to be done."""
