"""What is hooked inside the user's processes, how it is unhooked, and what is looked at from outside.

The package is callable, because the public function has the layer's name: ``with headrace.observe() as seen: ...``.
An attribute ``observe`` of ``headrace`` would be overwritten by the first import of a module in here.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.run.inline import Observation


class _Callable(types.ModuleType):
    """A module that can be called."""

    def __call__(self) -> Observation:
        """Observes this process for the length of a ``with`` block.

        Call it from the thread that trains. Entering hooks this process and starts a sampler beside it; leaving
        unhooks, and blocks for the analysis. ``report()`` of what it returns shows itself as HTML in Jupyter.

        Raises:
            UsageError: on entering, when this process is observed already.
        """
        # Upwards, late and only here: what was seen is gathered by the layer above.
        from headrace.run.inline import Observation

        return Observation()


sys.modules[__name__].__class__ = _Callable
