"""The lines of code that a change asks for. Pure text."""

from __future__ import annotations

from typing import Any


def dataloader_line(info: dict[str, Any], **changes: Any) -> str:
    """``DataLoader(...)`` as the user would write it, with what changes; unchanged arguments stand for themselves."""
    given = {"num_workers": info.get("num_workers"), **changes}
    if not given.get("num_workers"):
        given.pop("prefetch_factor", None)
        given.pop("persistent_workers", None)
    parts = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    return "DataLoader(..., " + ", ".join(parts) + ")"
