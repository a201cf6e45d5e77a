"""Hooks that bound and explain a step outside the loader: backward, optimizer, save, collectives called from Python."""

import functools
import sys
import time

from . import calls, stacks, state
from .hooks import HIDDEN, on_import, replace, when_uninstalled

OPTIMIZER, BACKWARD, DIST, SAVE = 8, 9, 13, 14
_mono = time.monotonic_ns


def _compiling():
    """Replaced by torch's own test once torch is there; torch.compile folds it to a constant and sees no hook."""
    return False


def _timed(kind):
    def make(original):
        @functools.wraps(original)
        def call(*args, **kwargs):
            if _compiling() or state.writer is None:
                return original(*args, **kwargs)
            t0 = _mono()
            try:
                return original(*args, **kwargs)
            finally:
                state.event(kind, t0, _mono())

        return call

    return make


@on_import("torch.autograd")
def backward(module):
    replace(module, "backward", _timed(BACKWARD))


@on_import("torch.compiler")
def compiling(module):
    global _compiling
    test = getattr(module, "is_compiling", None)
    if test is not None:
        _compiling = test


@on_import("torch.serialization")
def save(module):
    replace(module, "save", _timed(SAVE))


@on_import("torch.distributed.distributed_c10d")
def collectives(module):
    for name in ("all_reduce", "barrier", "broadcast", "all_gather", "reduce_scatter_tensor", "all_gather_into_tensor"):
        if hasattr(module, name):
            replace(module, name, _timed(DIST))


def _note_step(t0):
    w = state.writer
    if w is not None:
        w.event(OPTIMIZER, t0, _mono())
        stacks.after_step(w)
        calls.after_step()


@on_import("torch.distributed._functional_collectives")
def traceable(module):
    """torch.compile knows collectives by identity: its table must hold them with and without our hook."""
    table = getattr(module, "traceable_collective_remaps", {})
    home = sys.modules["torch.distributed.distributed_c10d"]
    for function, rewritten in list(table.items()):
        standing = getattr(home, function.__name__, None)
        if standing is not function and getattr(standing, "__wrapped__", None) is function:
            table[standing] = rewritten
        elif function.__code__.co_filename == HIDDEN:
            table[function.__wrapped__] = rewritten


@on_import("torch.optim.optimizer")
def optimizer(module):
    started = [0]

    def before(_optimizer, *_args, **_kwargs):
        if not _compiling():
            started[0] = _mono()

    def after(_optimizer, *_args, **_kwargs):
        if not _compiling() and started[0]:
            _note_step(started[0])

    for register, hook in (
        (module.register_optimizer_step_pre_hook, before),
        (module.register_optimizer_step_post_hook, after),
    ):
        when_uninstalled(register(hook).remove)
