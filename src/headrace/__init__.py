"""headrace: why an accelerator waits during PyTorch training, and what to change.

Importing it costs nothing: torch, and every part of headrace, is imported where it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.loader.loader import Loader
    from headrace.run.inline import Observation

    def observe() -> Observation:
        """What type checkers see: the package ``headrace.observe`` can be called."""


__all__ = ["Loader", "__version__", "observe"]

# Written down twice (pyproject.toml; a test compares them): asking importlib.metadata takes 50 ms.
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "observe":
        import importlib

        return importlib.import_module("headrace.observe")
    if name == "Loader":
        from headrace.loader.loader import Loader

        return Loader
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "Loader", "observe"})
