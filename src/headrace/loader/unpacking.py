"""Trainer's side of a batch: tensors and arrays over the slot or copied out of it, put into the skeleton.

Leaves of 64 KiB and more are handed out in place and share one lease of the slot; smaller ones are copied out and hold
nothing. Batches that are alike have the same table of leaves, so that a table is read once and kept as a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.core.layout import LEASED_BYTES, REQUIRES_GRAD, SHARES_STORAGE, TENSOR, Leaf, decode, runs, span
from headrace.loader.arena import ARRAY_DTYPES, DTYPES, TORCH_TO_ARRAY, tensor_over
from headrace.loader.lease import SlotMapping
from headrace.loader.skeleton import IN_SLOT, SLOT, Skins

_from_numpy, _ndarray = torch.from_numpy, np.ndarray
#: Plans of a steady loader are few; those of ever-changing batches are made anew.
_MAX_PLANS = 256


#: A plain tensor: number, shape, numpy's type, offset, strides in bytes or None when contiguous.
_Fast = tuple[int, tuple[int, ...], "np.dtype[Any]", int, "tuple[int, ...] | None"]
#: Any leaf: number, leaf, offset.
_Odd = tuple[int, Leaf, int]
_Shared = tuple[int, int, list[tuple[int, Leaf]]]


class _Copied(NamedTuple):
    """Leaves that are copied out of a slot together; their offsets are those in the copy."""

    start: int
    stop: int
    fast: list[_Fast]
    odd: list[_Odd]


class _Plan(NamedTuple):
    """What to do for a table of leaves."""

    num_leaves: int
    empty: list[tuple[int, Leaf]]
    copied: list[_Copied]
    #: Leaves to be handed out in place; their offsets are those in the slot.
    fast: list[_Fast]
    odd: list[_Odd]
    #: Leaves that share a storage: offset and bytes of each storage, (number, leaf) of its leaves.
    shared: list[_Shared]
    shared_small: list[_Shared]


class Unpacker:
    """Makes batches of what workers have packed; one per loader, used by the trainer's thread."""

    def __init__(self) -> None:
        self._plans: dict[bytes, _Plan] = {}
        self._skins = Skins()

    def unpack(self, skeleton: bytes, leaves: bytes, mapping: SlotMapping | None, *, copy_all: bool = False) -> Any:
        """Makes a batch. Does not block, and faults in no page of the slot.

        Each call with a mapping leads to exactly one ``Freed`` entry: at once when nothing was handed out in place,
        and when it fails; otherwise when the last of the batch's leases dies.

        Args:
            skeleton: ``Packed.skeleton``.
            leaves: ``Packed.leaves``.
            mapping: The slot; None for a batch that used no bytes.
            copy_all: Copies everything out, so that the slot is free again at once.

        Raises:
            Exception: Whatever unpickling an object of the batch raises.
        """
        try:
            if skeleton[:1] == SLOT:
                skeleton, leaves = _from_slot(skeleton, mapping)
            plan = self._plans.get(leaves)
            if plan is None:
                plan = self._make_plan(leaves)
            values: list[Any] = [None] * plan.num_leaves
            if plan.copied or plan.empty or plan.shared_small:
                _copy_out(plan, values, mapping)
            if copy_all:
                _copy_large(plan, values, mapping)
        except BaseException:
            if mapping is not None:
                mapping.free()
            raise
        if copy_all or not (plan.fast or plan.odd or plan.shared):
            if mapping is not None:
                mapping.free()
        else:
            assert mapping is not None
            _hand_out(plan, values, mapping.lease())
        return self._skins.fill(skeleton, values)

    def _make_plan(self, table: bytes) -> _Plan:
        plan = _plan(decode(table))
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[table] = plan
        return plan


def _from_slot(skeleton: bytes, mapping: SlotMapping | None) -> tuple[bytes, bytes]:
    assert mapping is not None
    offset, num_skeleton, num_leaves = IN_SLOT.unpack(skeleton[1:])
    middle = offset + num_skeleton
    buf = mapping.segment.buf
    return bytes(buf[offset:middle]), bytes(buf[middle : middle + num_leaves])


def _plan(leaves: list[Leaf]) -> _Plan:
    empty, small, large = [], [], []
    storages: dict[tuple[int, int], list[tuple[int, Leaf]]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.flags & SHARES_STORAGE:
            storages.setdefault((leaf.offset_bytes, leaf.num_bytes), []).append((number, leaf))
        elif not leaf.num_bytes:
            empty.append((number, leaf))
        elif leaf.num_bytes < LEASED_BYTES:
            small.append(number)
        else:
            large.append(number)
    copied = [_Copied(run.start, run.stop, *_sorted(leaves, run.members, run.start)) for run in runs(leaves, small)]
    shared = [(offset, num_bytes, members) for (offset, num_bytes), members in storages.items()]
    fast, odd = _sorted(leaves, large, 0)
    large_shared = [one for one in shared if one[1] >= LEASED_BYTES]
    return _Plan(len(leaves), empty, copied, fast, odd, large_shared, [one for one in shared if one[1] < LEASED_BYTES])


def _sorted(leaves: list[Leaf], numbers: list[int], start: int) -> tuple[list[_Fast], list[_Odd]]:
    """Plain tensors, and the others, with their offsets from ``start``."""
    fast: list[_Fast] = []
    odd: list[_Odd] = []
    for number in numbers:
        leaf = leaves[number]
        offset = leaf.offset_bytes - start
        dtype = TORCH_TO_ARRAY.get(DTYPES[leaf.dtype_code]) if leaf.kind == TENSOR and not leaf.flags else None
        if dtype is None:
            odd.append((number, leaf, offset))
        else:
            strides = None if leaf.strides is None else tuple(stride * dtype.itemsize for stride in leaf.strides)
            fast.append((number, leaf.shape, dtype, offset, strides))
    return fast, odd


def _copy_out(plan: _Plan, values: list[Any], mapping: SlotMapping | None) -> None:
    for number, leaf in plan.empty:
        values[number] = _empty(leaf)
    if plan.copied or plan.shared_small:
        assert mapping is not None
        buf = mapping.segment.buf
        for offset, num_bytes, members in plan.shared_small:
            _share(bytearray(buf[offset : offset + num_bytes]), 0, num_bytes, members, values)
        for start, stop, fast, odd in plan.copied:
            _fill(bytearray(buf[start:stop]), fast, odd, values)


def _copy_large(plan: _Plan, values: list[Any], mapping: SlotMapping | None) -> None:
    for number, shape, dtype, offset, strides in plan.fast:
        num_bytes = span(shape, strides) - 1 + dtype.itemsize if strides else math.prod(shape) * dtype.itemsize
        _fill(_copy(offset, num_bytes, mapping), [(number, shape, dtype, 0, strides)], (), values)
    for number, leaf, offset in plan.odd:
        _fill(_copy(offset, leaf.num_bytes, mapping), (), [(number, leaf, 0)], values)
    for offset, num_bytes, members in plan.shared:
        _share(_copy(offset, num_bytes, mapping), 0, num_bytes, members, values)


def _copy(offset: int, num_bytes: int, mapping: SlotMapping | None) -> Any:
    assert mapping is not None
    # torch copies with several threads and without the GIL
    return tensor_over(mapping.segment.root, torch.uint8, (num_bytes,), offset).clone().numpy()


def _hand_out(plan: _Plan, values: list[Any], owner: Any) -> None:
    _fill(owner, plan.fast, plan.odd, values)
    for offset, num_bytes, members in plan.shared:
        _share(owner, offset, num_bytes, members, values)


def _fill(owner: Any, fast: Sequence[_Fast], odd: Sequence[_Odd], values: list[Any]) -> None:
    """Makes leaves over the owner's bytes."""
    for number, shape, dtype, offset, strides in fast:
        values[number] = _from_numpy(_ndarray(shape, dtype, owner, offset, strides))
    for number, leaf, offset in odd:
        if leaf.kind == TENSOR:
            tensor = tensor_over(owner, DTYPES[leaf.dtype_code], leaf.shape, offset, leaf.strides)
            values[number] = tensor.requires_grad_() if leaf.flags & REQUIRES_GRAD else tensor
        else:
            values[number] = _ndarray(leaf.shape, ARRAY_DTYPES[leaf.dtype_code], owner, offset, leaf.strides)


def _share(owner: Any, offset: int, num_bytes: int, members: list[tuple[int, Leaf]], values: list[Any]) -> None:
    """Makes tensors over one storage."""
    storage = tensor_over(owner, torch.uint8, (num_bytes,), offset).untyped_storage()
    for number, leaf in members:
        tensor = torch.empty(0, dtype=DTYPES[leaf.dtype_code], device="cpu")
        strides = leaf.strides if leaf.strides is not None else torch.empty(leaf.shape, device="meta").stride()
        tensor.set_(storage, leaf.storage_offset, leaf.shape, strides)
        values[number] = tensor.requires_grad_() if leaf.flags & REQUIRES_GRAD else tensor


def _empty(leaf: Leaf) -> Any:
    tensor = torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype_code], device="cpu")
    if leaf.strides is not None:
        tensor.as_strided_(leaf.shape, leaf.strides)
    return tensor.requires_grad_() if leaf.flags & REQUIRES_GRAD else tensor
