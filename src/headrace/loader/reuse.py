"""Datasets that give the same buffer for every sample, filled anew each time.

DataLoader stacks such samples when the last one has overwritten all others, and says nothing. Here the first samples of
a worker's first batch are copied as they come, and compared with themselves when the batch is complete: if they have
changed, every sample is copied from then on. A dataset that gives one constant tensor again and again is not meant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

#: Samples of the first batch that are compared; a dataset that takes its buffers in turn overwrites the first one too.
NUM_PROBED = 2


def copied(sample: Any) -> Any:
    """A sample with copies of its tensors and arrays; other objects are the same ones."""
    kind = type(sample)
    if kind is torch.Tensor:
        return sample.detach().clone().requires_grad_(sample.requires_grad) if sample.is_leaf else sample.clone()
    if kind is np.ndarray:
        return sample.copy()
    if kind in (list, tuple):
        return kind([copied(part) for part in sample])
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return kind(*[copied(part) for part in sample])
    if kind is dict:
        return {key: copied(part) for key, part in sample.items()}
    return sample


def has_changed(sample: Any, copy: Any) -> bool:
    """Whether a tensor or array of ``sample`` is not what it was when it was copied."""
    kind = type(sample)
    if kind is torch.Tensor:
        return sample is not copy and not _same_bytes(sample, copy)
    if kind is np.ndarray:
        return sample is not copy and sample.dtype != object and sample.tobytes() != copy.tobytes()
    if kind in (list, tuple) or (isinstance(sample, tuple) and hasattr(sample, "_fields")):
        return any(has_changed(one, two) for one, two in zip(sample, copy, strict=True))
    if kind is dict:
        return any(has_changed(part, copy[key]) for key, part in sample.items())
    return False


def _same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal bit for bit, not-a-numbers included; what has no plain bytes counts as the same."""
    if one.layout is not torch.strided or one.is_quantized or one.is_nested or one.device.type != "cpu":
        return True
    one, two = one.detach(), two.detach()
    if one.dtype.is_floating_point or one.dtype.is_complex:
        one, two = one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)
    return torch.equal(one, two)


class ReuseProbe:
    """What is known about a dataset's buffers, in one worker.

    Attributes:
        is_probing: Whether the samples of this batch are to be given to ``keep``.
        copies: Whether every sample is to be copied as it comes.
    """

    __slots__ = ("_kept", "copies", "is_probing")

    def __init__(self) -> None:
        self.is_probing, self.copies = True, False
        self._kept: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """A batch begins."""
        self._kept.clear()

    def keep(self, sample: Any) -> None:
        """A sample of the batch, which has just been made."""
        if len(self._kept) < NUM_PROBED:
            self._kept.append((sample, copied(sample)))

    def end(self) -> bool:
        """The batch is complete; whether it has to be made again, with copies."""
        if len(self._kept) < NUM_PROBED:
            return False  # of one sample nothing can be learned
        self.is_probing = False
        self.copies = any(has_changed(sample, copy) for sample, copy in self._kept)
        self._kept.clear()
        return self.copies
