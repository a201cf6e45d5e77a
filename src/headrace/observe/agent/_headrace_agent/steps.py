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


class _Backward:
    """The last backward; the optimizer's event tells of it, too, so that a step has one event less."""

    __slots__ = ("t0", "t1")

    def __init__(self):
        self.t0 = self.t1 = 0


_last = _Backward()


def _timed_backward(original):
    last = _last

    @functools.wraps(original)
    def backward(*args, **kwargs):
        if state.writer is None or _compiling():
            return original(*args, **kwargs)
        if last.t0:
            _flush()  # gradients are accumulated: no optimizer step came in between
        t0 = _mono()
        try:
            return original(*args, **kwargs)
        finally:
            t1 = _mono()
            if last.t0:
                _flush()  # of another thread, or of a backward within this one
            last.t0, last.t1 = t0, t1

    return backward


def _flush():
    t0, t1, _last.t0, _last.t1 = _last.t0, _last.t1, 0, 0
    if t0:
        state.event(BACKWARD, t0, t1)


def _forget():
    _last.t0 = _last.t1 = 0


state._at_fork_child.append(_forget)
state.at_end.append(_flush)


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
    replace(module, "backward", _timed_backward)


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
    last, watch = _last, stacks.watch
    alive, inside = [True], []

    def after(_optimizer, _args, _kwargs):
        w = state.writer
        if w is None or not alive or _compiling():
            return
        # One hook, not two: each costs a microsecond. A step begins where backward ended.
        t1 = _mono()
        w.event(OPTIMIZER, last.t1 or t1, t1, last.t0)
        last.t0 = last.t1 = 0
        if not watch.first_ns:
            inside.append(True)
            stacks.after_step(w)
            inside.clear()
        if calls._wanted is not None:
            calls.after_step()

    handle = module.register_optimizer_step_post_hook(after)

    def remove():
        alive.clear()
        if not inside:  # else torch walks over its hooks at this moment: ours stays, and does nothing
            handle.remove()

    when_uninstalled(remove)
