"""What a worker gets from its loader, and what makes it a worker: its seeds and ``get_worker_info()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import _utils

from headrace.loader.device import is_default_device_cpu
from headrace.loader.seeding import Generators, PlaceRng, seed_worker
from headrace.loader.threads import set_thread_info


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """All that a worker has from its loader; inherited under fork, pickled under spawn and forkserver.

    Attributes:
        dataset: The user's.
        is_iterable: Whether it is an iterable dataset.
        auto_collation: Whether tasks are batches of indices.
        collate_fn: The user's or torch's.
        drop_last: For iterable datasets.
        init_fn: ``worker_init_fn``.
        base_seed: As DataLoader draws it.
        num_workers: At the start.
        shared_seed: For torch's iterable data pipes; None otherwise.
        seeds: ``"place"`` or ``"torch"``.
        is_thread: Whether workers are threads of the trainer.
    """

    dataset: Any
    is_iterable: bool
    auto_collation: bool
    collate_fn: Any
    drop_last: bool
    init_fn: Any
    base_seed: int
    num_workers: int
    shared_seed: int | None
    seeds: str
    is_thread: bool = False


class Identity:
    """Who a worker is, to the dataset. Belongs to the worker's thread.

    Attributes:
        dataset: The user's; replaced by data pipes that are seeded for a pass.
    """

    def __init__(self, number: int, setup: WorkerSetup) -> None:
        self.dataset = setup.dataset
        self._number, self._setup = number, setup
        self._seed, self._rng = 0, PlaceRng()

    def begin(self, num_workers: int) -> Generators:
        """Become a worker; the generators that its samples may draw from."""
        setup = self._setup
        if not setup.is_thread:
            torch.multiprocessing._set_thread_name("pt_data_worker")
        torch.set_num_threads(1)  # of this thread
        if not is_default_device_cpu():
            torch.set_default_device("cpu")  # a forked worker cannot use another
        generators = self._seed_generators()
        self.apply_shared_seed(setup.shared_seed)
        self.set_info(num_workers)
        return generators

    def _seed_generators(self) -> Generators:
        base_seed = self._setup.base_seed
        if self._setup.is_thread:
            self._seed = base_seed + self._number
            return Generators.of_thread(self._rng)
        self._seed = seed_worker(base_seed, self._number)
        return Generators.of_process(self._rng)

    def apply_shared_seed(self, shared_seed: int | None) -> None:
        """Shuffles of torch's iterable data pipes are the same in all workers, and new in each pass."""
        if shared_seed is not None:
            generator = torch.Generator()
            generator.manual_seed(shared_seed)
            self.dataset = torch.utils.data.graph_settings.apply_random_seed(self.dataset, generator)

    def set_info(self, num_workers: int) -> None:
        """What ``get_worker_info()`` says from now on."""
        kind: Any = _utils.worker.WorkerInfo
        known = getattr(kind, "__dataclass_fields__", {})  # older releases take any names
        more = {"rng": self._rng, "worker_method": "thread" if self._setup.is_thread else "multiprocessing"}
        info = kind(
            id=self._number,
            num_workers=num_workers,
            seed=self._seed,
            dataset=self.dataset,
            **{name: value for name, value in more.items() if name in known or not known},
        )
        if self._setup.is_thread:
            set_thread_info(info)
        else:
            _utils.worker._worker_info = info

    def end(self) -> None:
        """No worker any more."""
        if self._setup.is_thread:
            set_thread_info(None)
        else:
            _utils.worker._worker_info = None
