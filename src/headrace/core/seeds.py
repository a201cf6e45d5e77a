"""From a sample's place in the run to the integer that its random generators are seeded with.

Pure. A place is (base seed, epoch, batch, row); who makes the sample, and when, does not enter. Distinct places give
distinct integers: the parts lie side by side, nothing is hashed, and the generators' own key schedule (MT19937's
``init_by_array``, which takes keys of any length) does the mixing.
"""

from __future__ import annotations

import enum

#: A place that is no row: all rows at once (``__getitems__``, or ``batch_size=None``).
ROW_OF_BATCH = (1 << 32) - 2
#: A place that is no row: the ``collate_fn``.
ROW_OF_COLLATE = (1 << 32) - 1

_BASE_SHIFT = 0
_EPOCH_SHIFT = 64
_BATCH_SHIFT = 112
_ROW_SHIFT = 160
_STREAM_SHIFT = 192


class Stream(enum.IntEnum):
    """Which generator a seed is for; never 0, so that all keys have the same length. Values are part of the results."""

    PYTHON = 1
    NUMPY = 2
    TORCH = 3
    OWN_PYTHON = 4
    OWN_NUMPY = 5
    OWN_TORCH = 6


def batch_key(base_seed: int, epoch: int, batch: int) -> int:
    """The part of a key that all rows of a batch share.

    Args:
        base_seed: 0 to 2**64 - 1, drawn once per pass (or once per pool) as DataLoader draws it.
        epoch: Number of the pass, below 2**48.
        batch: Number of the batch in the pass, below 2**48.
    """
    return (base_seed << _BASE_SHIFT) | (epoch << _EPOCH_SHIFT) | (batch << _BATCH_SHIFT)


def row_key(key_of_batch: int, row: int, stream: Stream) -> int:
    """The seed of one generator at one place.

    Args:
        key_of_batch: From ``batch_key``.
        row: Row of the sample in its batch, below 2**32 - 2, or one of the two places above.
        stream: For which generator.
    """
    return key_of_batch | (row << _ROW_SHIFT) | (stream << _STREAM_SHIFT)
