"""Where the tensors and arrays of a batch lie in a slot: the table of leaves, alignment, overlaps, copies. Pure.

A batch travels as a *skeleton* (how it is nested, with a number in the place of each leaf) and a table of *leaves*
(what each one is and where its bytes lie). The table is made by the worker and read by the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

#: Vector registers and the DMA engine like 64 bytes; big tensors start on their own pages.
ALIGN_BYTES = 64
PAGE_BYTES = 4096
#: From this size on a leaf is handed out in place and holds its slot; below, copying costs less than a slot does.
LEASED_BYTES = 64 * 1024
#: Small neighbours are copied out together up to this size. Keeping one of them keeps the others: a page at most,
#: which is what a tensor of its own segment costs.
RUN_BYTES = PAGE_BYTES

TENSOR, ARRAY = 0, 1
#: Bits of ``Leaf.flags``.
REQUIRES_GRAD, SHARES_STORAGE = 1, 2


class Leaf(NamedTuple):
    """One tensor or array of a batch.

    Attributes:
        kind: ``TENSOR`` or ``ARRAY``.
        dtype_code: Position in the table of element types of that kind.
        flags: ``REQUIRES_GRAD`` | ``SHARES_STORAGE``; leaves that share name the same ``offset_bytes``.
        offset_bytes: Where its storage starts, from the start of the segment.
        num_bytes: Size of its storage; 0 for a leaf without elements.
        shape: Elements along each dimension.
        strides: In elements for tensors and in bytes for arrays; None when C-contiguous.
        storage_offset: In elements from the start of the storage; 0 but for leaves that share one.
    """

    kind: int
    dtype_code: int
    flags: int
    offset_bytes: int
    num_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    storage_offset: int = 0


# kind, dtype code, flags, number of dimensions, has strides, offset, bytes, storage offset
_HEAD = Struct("<BBBBB3xQQQ")
_DIMS = [Struct(f"<{n}q") for n in range(65)]


def encode_leaf(
    kind: int,
    dtype_code: int,
    flags: int,
    offset_bytes: int,
    num_bytes: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    storage_offset: int,
) -> bytes:
    """The bytes of one leaf in the table (see ``Leaf``); a table is the leaves' bytes joined."""
    num = len(shape)
    head = _HEAD.pack(kind, dtype_code, flags, num, strides is not None, offset_bytes, num_bytes, storage_offset)
    if strides is None:
        return head + _DIMS[num].pack(*shape)
    return head + _DIMS[num].pack(*shape) + _DIMS[num].pack(*strides)


def encode(leaf: Leaf) -> bytes:
    """The bytes of one leaf in the table."""
    return encode_leaf(*leaf)


def decode(table: bytes) -> list[Leaf]:
    """The leaves of a table, in the order in which the skeleton numbers them."""
    leaves, at, end = [], 0, len(table)
    while at < end:
        kind, code, flags, num, has_strides, offset, size, storage_offset = _HEAD.unpack_from(table, at)
        at += _HEAD.size
        dims = _DIMS[num]
        shape = dims.unpack_from(table, at)
        at += dims.size
        strides = None
        if has_strides:
            strides = dims.unpack_from(table, at)
            at += dims.size
        leaves.append(Leaf(kind, code, flags, offset, size, shape, strides, storage_offset))
    return leaves


def aligned(offset_bytes: int, num_bytes: int) -> int:
    """The first place at or after ``offset_bytes`` where a leaf of ``num_bytes`` may start."""
    step = PAGE_BYTES if num_bytes >= LEASED_BYTES else ALIGN_BYTES
    return -(-offset_bytes // step) * step


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a tensor with these strides (none negative); 0 when it has none."""
    last = 0
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last + 1


def keeps_strides(span_bytes: int, num_bytes: int) -> bool:
    """Whether a tensor of ``num_bytes`` travels with its gaps: when they are small, or it repeats its elements."""
    return span_bytes <= max(2 * num_bytes, LEASED_BYTES)


def segment_bytes(needed_bytes: int, outgrown_bytes: int) -> int:
    """Size of a new segment: what is needed, and an eighth more where batches have been seen to grow."""
    grown = needed_bytes + needed_bytes // 8 if outgrown_bytes else needed_bytes
    return -(-max(grown, 1) // PAGE_BYTES) * PAGE_BYTES


def overlaps(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Groups of spans of memory that overlap, each of two or more.

    Args:
        spans: (start, end) addresses; empty spans overlap nothing.

    Returns:
        Positions in ``spans``, each group ordered by address. Spans that only touch do not overlap.
    """
    order = sorted((start, end, at) for at, (start, end) in enumerate(spans) if end > start)
    groups: list[list[int]] = []
    reach, group = -1, [0]
    for start, end, at in order:
        if start < reach:
            group.append(at)
            if len(group) == 2:
                groups.append(group)
        else:
            group = [at]
        reach = max(reach, end)
    return groups


class Run(NamedTuple):
    """Neighbours that are copied out of a slot together: from ``start`` to ``stop``, in bytes of the segment."""

    start: int
    stop: int
    members: list[int]


def runs(leaves: Sequence[Leaf], members: Sequence[int]) -> list[Run]:
    """Cuts leaves into runs of neighbours of at most ``RUN_BYTES``, a larger leaf being alone.

    Args:
        leaves: The table.
        members: Positions of the leaves to copy out.
    """
    found: list[Run] = []
    for at in sorted(members, key=lambda at: leaves[at].offset_bytes):
        start = leaves[at].offset_bytes
        stop = start + leaves[at].num_bytes
        if found and stop - found[-1].start <= RUN_BYTES:
            run = found[-1]
            found[-1] = Run(run.start, max(run.stop, stop), [*run.members, at])
        else:
            found.append(Run(start, stop, [at]))
    return found
