"""Worker side of a batch: collates it straight into a slot and turns it into a skeleton and a table of leaves.

    samples --collate--> batch --pickle--> skeleton (leaf numbers instead of tensors)
                           |
                           `--tensors, arrays--> slot: written there by the collate, or copied once; table of leaves

With torch's ``default_collate`` the collation is torch's own recursion with two of its functions exchanged: tensors
and arrays are stacked into the slot. With any other ``collate_fn`` its result is copied into the slot, each byte once.
What is not plain bytes of a CPU tensor or of a numeric array (sparse, nested, quantised, subclasses, images, ...) is
pickled by value, and the tensors and storages inside it are leaves again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from headrace.core.layout import aligned, segment_bytes
from headrace.host.memfd import Segment
from headrace.loader.arena import ARRAY_TO_TORCH, Arena
from headrace.loader.placing import Block, blocks_of, put
from headrace.loader.skeleton import IN_SLOT, SLOT, Skeletons, is_bytes

#: Skeleton and table travel in the message up to this size, and in the slot beyond it.
INLINE_BYTES = 8192


@dataclass(slots=True)
class Packed:
    """A batch on its way to the trainer.

    Attributes:
        skeleton: How the batch is nested; the same bytes for batches that are nested alike.
        leaves: Table of its tensors and arrays; the same bytes for batches that are alike in type, shape and place.
        used_bytes: Bytes of the segment that it takes.
        segment: Where its bytes lie: the segment that was given, a new one, or None where none was needed.
        is_new: Whether ``make_segment`` made the segment.
    """

    skeleton: bytes
    leaves: bytes
    used_bytes: int
    segment: Segment | None
    is_new: bool


def stack_on_the_heap() -> None:
    """In a worker process, once: torch's ``collate_tensor_fn`` makes no segment in ``/dev/shm`` for each tensor.

    It does so in any process that has worker information, also when a user's own ``collate_fn`` calls it; we then copy
    its result into a slot, and a small ``/dev/shm`` would end the worker with a bus error.
    """
    heap = classmethod(lambda cls, size, *, device="cpu": cls(size, device=device))
    torch.UntypedStorage._new_shared = heap  # type: ignore[method-assign,assignment]  # the one place where it can be had


class Packer:
    """Collates and packs, in the worker; one per worker, used by one thread."""

    def __init__(
        self, collate_fn: Callable[[Any], Any], make_segment: Callable[[int], Segment] = Segment.create
    ) -> None:
        """Prepares for a loader's ``collate_fn``.

        Args:
            collate_fn: torch's ``default_collate`` is done in place; anything else is called as it is.
            make_segment: Called with a number of bytes when the batch does not fit; checks the room and may raise.
        """
        self._collate_fn = collate_fn
        self._make_segment = make_segment
        self._arena: Arena | None = None
        self._skeletons = Skeletons()

    def pack(self, samples: Any, segment: Segment | None, *, collate: bool = True) -> Packed:
        """Collates samples and puts the batch into a slot.

        Args:
            samples: What ``collate_fn`` takes: a list of samples, or the sample itself with ``batch_size=None``.
            segment: The slot to fill from its start, or None when a new one is wanted.
            collate: False packs ``samples`` as they are.

        Returns:
            The batch, in ``segment`` or in a larger one.

        Raises:
            Exception: Whatever ``collate_fn``, pickling or ``make_segment`` raises; the segment can be used again.
        """
        self._arena = Arena.of(segment) if segment is not None else None
        batch = self._collate(samples) if collate else samples
        skeleton, items = self._skeletons.of(batch, self._arena.placed if self._arena is not None else {})
        return self._place(skeleton, items)

    # collating

    def _collate(self, samples: Any) -> Any:
        if self._collate_fn is not torch_collate.default_collate:
            return self._collate_fn(samples)
        # The user's additions and replacements count, at any time, and their order is the order of isinstance checks.
        functions: dict[Any, Any] = torch_collate.default_collate_fn_map.copy()
        if functions.get(torch.Tensor) is torch_collate.collate_tensor_fn:
            functions[torch.Tensor] = self._stack
            if functions.get(np.ndarray) is torch_collate.collate_numpy_array_fn:
                functions[np.ndarray] = self._stack_arrays
        return torch_collate.collate(samples, collate_fn_map=functions)

    def _out(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        out = self._arena.out(dtype, shape) if self._arena is not None else None
        return torch.empty(shape, dtype=dtype, device="cpu") if out is None else out

    def _stack(self, batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """Torch's ``collate_tensor_fn``, whose ``out=`` lies in the slot and not in a segment of its own."""
        elem = batch[0]
        if type(elem) is not torch.Tensor or not is_bytes(elem):
            return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]  # untyped in torch
        return torch.stack(batch, 0, out=self._out(elem.dtype, (len(batch), *elem.shape)))  # type: ignore[arg-type]  # takes any sequence

    def _stack_arrays(self, batch: Sequence[np.ndarray[Any, Any]], *, collate_fn_map: Any = None) -> Any:
        """Torch's ``collate_numpy_array_fn`` without a tensor for each array, where all are alike."""
        elem = batch[0]
        dtype, shape = ARRAY_TO_TORCH.get(elem.dtype), elem.shape
        for array in batch:
            if (
                type(array) is not np.ndarray
                or array.shape != shape
                or array.dtype is not elem.dtype
                or not array.flags.c_contiguous
            ):
                dtype = None
                break
        if dtype is None:
            return torch_collate.collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)
        out = self._out(dtype, (len(batch), *shape))
        np.stack(batch, out=out.numpy())
        return out

    # placing

    def _place(self, skeleton: bytes, items: list[Any]) -> Packed:
        arena = self._arena
        if arena is None:
            return self._place_anew(skeleton, items, 0)
        table: list[bytes] = []
        fresh: list[int] = []
        placed = arena.placed
        for item in items:
            known = placed.get(id(item))
            if known is not None and item.requires_grad:  # a collate function has changed our view
                arena.forget_views()
                known = None
            if known is None:
                fresh.append(len(table))
                known = b""
            table.append(known)
        if fresh and not put(arena, blocks_of([items[at] for at in fresh]), table, fresh):
            return self._place_anew(skeleton, items, arena.segment.size_bytes)
        return self._finish(arena, skeleton, b"".join(table), items, is_new=False)

    def _place_anew(self, skeleton: bytes, items: list[Any], outgrown_bytes: int) -> Packed:
        """Makes a segment that is large enough and copies everything into it."""
        blocks = blocks_of(items)
        needed = _needed_bytes(skeleton, blocks)
        encoded = [b""] * len(items)
        if not needed:
            put(None, blocks, encoded, range(len(items)))
            return Packed(
                skeleton, b"".join(encoded), 0, self._arena.segment if self._arena is not None else None, False
            )
        arena = Arena.of(self._make_segment(segment_bytes(needed, outgrown_bytes)))
        if not put(arena, blocks, encoded, range(len(items))):
            raise AssertionError("a segment that was made for a batch does not hold it")
        return self._finish(arena, skeleton, b"".join(encoded), items, is_new=True)

    def _finish(self, arena: Arena, skeleton: bytes, table: bytes, items: list[Any], *, is_new: bool) -> Packed:
        size = len(skeleton) + len(table)
        if size <= INLINE_BYTES:
            return Packed(skeleton, table, arena.top, arena.segment, is_new)
        offset = arena.take(size)
        if offset is None:
            return self._place_anew(skeleton, items, arena.segment.size_bytes)
        arena.segment.buf[offset : offset + size] = skeleton + table
        where = SLOT + IN_SLOT.pack(offset, len(skeleton), len(table))
        return Packed(where, b"", arena.top, arena.segment, is_new)


def _needed_bytes(skeleton: bytes, blocks: list[Block]) -> int:
    """Room for all blocks, and for skeleton and table where they will not go with the message."""
    needed = 0
    for block in blocks:
        needed = aligned(needed, block.num_bytes) + block.num_bytes
    described = len(skeleton) + sum(len(block.members) * (32 + 16 * block.max_dims) for block in blocks)
    return needed + (aligned(described, described) + 4096 if described > INLINE_BYTES else 0)
