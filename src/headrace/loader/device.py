"""Where tensors are made that nobody has named a device for: in a loader, on the CPU, whatever the default is.

With ``torch.set_default_device("cuda")`` DataLoader's own sampler fails, and forked workers cannot use the device.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils.data import _utils


def is_default_device_cpu() -> bool:
    """Whether tensors without a named device are made on the CPU in this thread."""
    return bool(torch.get_default_device().type == "cpu")


def cpu_by_default() -> contextlib.AbstractContextManager[object]:
    """Make tensors on the CPU inside of it."""
    return contextlib.nullcontext() if is_default_device_cpu() else torch.device("cpu")


def pinned(data: Any, device: str | None) -> Any:
    """A batch in page-locked memory of torch's own allocator, which torch guards while a copy reads it."""
    return _utils.pin_memory.pin_memory(data, device)  # type: ignore[no-untyped-call]  # torch has no types here
