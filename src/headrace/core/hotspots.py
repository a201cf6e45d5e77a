"""Names where the dataset's time goes, from sampled stacks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..records.run import Hotspot

_MOST = 6
#: Innermost functions that mean waiting for a lock although the kernel only says futex.
_LOCK_FILES = ("threading.py", "queue.py", "synchronize.py", "connection.py")
#: What a library's frame means to the person who reads the report.
_NAMES = (
    ("PIL/ImageFile.py", "PIL image decode"), ("PIL/Image.py", "PIL image operation"),
    ("torchvision/", "torchvision transform"), ("cv2", "OpenCV"), ("numpy/", "numpy"),
    ("torch/utils/data/_utils/collate.py", "default_collate"),
    ("torch/", "torch"),
    ("pandas/", "pandas"), ("json/", "json"), ("pickle.py", "pickle"), ("sqlite3", "sqlite"), ("h5py/", "HDF5"),
)  # fmt: skip


def hotspots(lines: Iterable[dict[str, Any]], mostly_blocked: bool) -> list[Hotspot]:
    """Groups samples by the user's innermost line and what the thread was doing there.

    Args:
        lines: ``stacks`` meta lines of the processes that fetch.
        mostly_blocked: whether schedstat says that the fetches are blocked: only then is a bare futex a lock, otherwise
            it is the wait for the GIL that the look itself causes.
    """
    counts: Counter[tuple[str, str, str, str | None]] = Counter()
    for line in lines:
        for count, state, frames in line.get("rows", ()):
            site, function, inner = _place(frames)
            counts[site, function, _state(state, frames, mostly_blocked), _what(inner)] += count
    total = sum(counts.values())
    return [
        Hotspot(share_frac=round(count / total, 4), site=site, function=function, state=state, what=what)
        for (site, function, state, what), count in counts.most_common(_MOST)
    ]


def _place(frames: list[str]) -> tuple[str, str, str]:
    """(user's innermost line, its function, innermost frame of all)."""
    inner = frames[0].lstrip("*") if frames else "?|?"
    own = next((frame for frame in frames if frame.startswith("*")), None)
    site, _, function = (own or inner).lstrip("*").partition("|")
    return site, function, inner


def _state(state: str, frames: list[str], mostly_blocked: bool) -> str:
    if state == "lock":
        file = frames[0].split("|")[0].rsplit(":", 1)[0] if frames else ""
        return "lock" if mostly_blocked or file.endswith(_LOCK_FILES) else "running"
    return "running" if state == "unknown" and not mostly_blocked else state


def _what(inner: str) -> str | None:
    path = inner.replace("\\", "/")
    name = next((text for part, text in _NAMES if part in path), None)
    function = path.partition("|")[2]
    return f"{name} ({function})" if name else None
