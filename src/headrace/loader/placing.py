"""What lies where: the tensors and arrays of a batch as blocks of bytes, and their way into a slot.

A tensor travels as the bytes from its first to its last element, with its strides: channels_last stays so, and an
expanded tensor takes as little room as it did. Only where the gaps between its elements would be large, as in one
column of a wide table, are they left out. Tensors of one batch that overlap in memory travel as one block, and overlap
afterwards, as they do when torch sends them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.core.layout import (
    ARRAY,
    REQUIRES_GRAD,
    SHARES_STORAGE,
    TENSOR,
    encode_leaf,
    keeps_strides,
    overlaps,
    span,
)
from headrace.loader.arena import ARRAY_CODES, DTYPE_CODES, Arena, tensor_over


class Block:
    """Bytes that are copied together, with the leaves that lie in them.

    Attributes:
        address: Where the bytes are now; 0 when ``item`` must be copied element by element.
        num_bytes: How many.
        item: The tensor or array, which the block keeps alive.
        members: Leaves: position, kind, dtype code, flags, shape, strides, storage offset in elements.
    """

    __slots__ = ("address", "item", "members", "num_bytes")

    def __init__(self, address: int, num_bytes: int, item: Any, members: list[tuple[Any, ...]]) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.item = item
        self.members = members

    @property
    def max_dims(self) -> int:
        """Dimensions of the leaf that has most."""
        return max(len(member[4]) for member in self.members)


def blocks_of(items: Sequence[Any]) -> list[Block]:
    """The blocks of tensors and arrays, in their order; what overlaps is one block."""
    blocks = [
        _array_block(at, item) if type(item) is np.ndarray else _tensor_block(at, item) for at, item in enumerate(items)
    ]
    if len(blocks) > 1:
        for group in overlaps(
            [(block.address, block.address + block.num_bytes if block.address else 0) for block in blocks]
        ):
            _merge([blocks[at] for at in group])
        return [block for block in blocks if block.members]
    return blocks


def _tensor_block(at: int, item: torch.Tensor) -> Block:
    flags = REQUIRES_GRAD if item.requires_grad else 0
    shape = tuple(item.shape)
    strides: tuple[int, ...] | None = None
    num_bytes = item.nbytes
    address = item.data_ptr()
    if not item.is_contiguous() or 1 in shape or 0 in shape:  # contiguous says nothing about those dimensions' strides
        strides = item.stride()
        span_bytes = span(shape, strides) * item.element_size()
        if keeps_strides(span_bytes, num_bytes):
            num_bytes = span_bytes
        elif num_bytes:
            strides, address = torch.empty_like(item, device="meta").stride(), 0
    return Block(address, num_bytes, item, [(at, TENSOR, DTYPE_CODES[item.dtype], flags, shape, strides, 0)])


def _array_block(at: int, item: np.ndarray[Any, Any]) -> Block:
    # As pickle does it: in Fortran's order where the array is in that and not in C's, otherwise in C's.
    fortran = item.flags.f_contiguous and not item.flags.c_contiguous
    strides = item.strides if fortran else None
    return Block(0, item.nbytes, item, [(at, ARRAY, ARRAY_CODES[item.dtype], 0, item.shape, strides, 0)])


def _merge(group: list[Block]) -> None:
    """Puts all leaves of overlapping tensors into the first one's block; leaves the others without any."""
    start = group[0].address & ~15  # the first of them; any element size up to 16 then divides the distances
    if any((block.address - start) % block.item.element_size() for block in group):
        return
    stop = max(block.address + block.num_bytes for block in group)
    members = []
    for block in group:
        at, kind, code, flags, shape, strides, _ = block.members[0]
        offset = (block.address - start) // block.item.element_size()
        members.append((at, kind, code, flags | SHARES_STORAGE, shape, strides, offset))
        block.members = []
    first = group[0]
    first.item = [block.item for block in group]
    first.address, first.num_bytes, first.members = start, stop - start, members


def put(arena: Arena | None, blocks: list[Block], table: list[bytes], positions: Sequence[int]) -> bool:
    """Copies blocks into a slot and writes their leaves.

    Args:
        arena: The slot; None when no block has any bytes.
        blocks: What to copy; a block that lies in the slot already stays where it is.
        table: Gets the bytes of each leaf.
        positions: Where in ``table`` the leaf of each position goes.

    Returns:
        False when it does not fit; nothing was copied then.
    """
    offsets = []
    for block in blocks:
        offset = _place(arena, block)
        if offset is None:
            return False
        offsets.append(offset)
    for block, offset in zip(blocks, offsets, strict=True):
        if block.num_bytes and arena is not None:
            _copy(arena, block, offset)
        for at, kind, code, flags, shape, strides, storage_offset in block.members:
            table[positions[at]] = encode_leaf(
                kind, code, flags, offset, block.num_bytes, shape, strides, storage_offset
            )
    return True


def _place(arena: Arena | None, block: Block) -> int | None:
    if arena is None or not block.num_bytes:
        return 0
    if arena.start <= block.address < arena.stop:
        return block.address - arena.start
    return arena.take(block.num_bytes)


def _copy(arena: Arena, block: Block, offset: int) -> None:
    if block.address:
        if block.address != arena.start + offset:
            ctypes.memmove(arena.start + offset, block.address, block.num_bytes)
        return
    item, (_, kind, _, _, shape, strides, _) = block.item, block.members[0]
    if kind == ARRAY:
        np.copyto(np.ndarray(shape, item.dtype, arena.segment.root, offset, strides), item)
    else:
        tensor_over(arena.segment.root, item.dtype, shape, offset, strides).copy_(item.detach())
