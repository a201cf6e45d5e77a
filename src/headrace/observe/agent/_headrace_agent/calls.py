"""``--data module:function``: any function, generator function or iterator class is treated as the loader.

The named thing is replaced in its module by a stand-in that times each call (or each ``next()`` of what it returned).
In the main script it can only be replaced once it exists: that is at the first optimizer that is made, or at the first
optimizer step.
"""

import functools
import inspect
import sys
import time

from . import stacks, state
from .hooks import on_import, replace

CALL = 15
_mono = time.monotonic_ns
_thread_time = time.thread_time_ns
_wanted = None


def arm(spec):
    """``spec`` is ``module:name`` or ``module:Class.name``; the script's file name or ``__main__`` mean the script."""
    global _wanted
    module, _, name = spec.partition(":")
    _wanted = (module, name)
    on_import(module)(_patch_module)


def _patch_module(module):
    _patch(module)


@on_import("torch.optim.optimizer")
def main_script(module):
    if _wanted is not None:
        replace(module.Optimizer, "__init__", _after_init)


def _after_init(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        after_step()

    return __init__


@state.quiet("data")
def after_step():
    """Looks for the wanted name in the main script, until it is found."""
    if _wanted is None:
        return
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None) or ""
    stem = path.replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0]
    if main is not None and _wanted[0] in ("__main__", stem):
        _patch(main)


def _patch(module):
    global _wanted
    wanted = _wanted
    if wanted is None:
        return  # found before: the main script had it, and is now imported under its own name
    *outer, name = wanted[1].split(".")
    owner = module
    for part in outer:
        owner = getattr(owner, part, None)
    if not hasattr(owner, name):
        return  # not there yet
    source = wanted[0] + ":" + wanted[1]
    _wanted = None
    iter_id = state.next_id()
    state.meta("loader", loader=iter_id, site=source, call=True)
    state.meta("iter", iter=iter_id, loader=iter_id, workers=[], queue=0)
    raw = vars(owner).get(name)
    if isinstance(raw, (staticmethod, classmethod)):
        replace(owner, name, lambda _: type(raw)(_stand_in(raw.__func__, iter_id)))
    else:
        replace(owner, name, lambda original: _stand_in(original, iter_id))


def _stand_in(original, iter_id):
    if inspect.isclass(original):
        return _timed_class(original, iter_id)
    if not inspect.isroutine(original) and hasattr(type(original), "__iter__"):
        return _timed_instance(original, iter_id)

    @functools.wraps(original)
    def call(*args, **kwargs):
        if state.writer is None:
            return original(*args, **kwargs)
        t0, c0 = _mono(), _thread_time()
        result = original(*args, **kwargs)
        if hasattr(type(result), "__next__"):
            return _Timed(result, iter_id)
        _note(iter_id, t0, c0)
        return result

    return call


def _note(iter_id, t0, c0):
    w = state.writer
    if w is not None:
        t1 = _mono()
        w.event(CALL, t0, t1, iter_id, 0, 0, _thread_time() - c0)
        stacks.after_next(w, t0, t1)


def _timed_instance(original, iter_id):
    try:
        return _timed_class(type(original), iter_id, original)
    except TypeError:  # generators and the like: their class cannot be changed
        return _Timed(original, iter_id) if hasattr(original, "__next__") else original


def _timed_class(cls, iter_id, only=None):
    """Hooks a class, so that its instances keep their type; ``only`` one of them counts when it is given."""
    if hasattr(cls, "__next__"):
        replace(cls, "__next__", lambda original: _timed_next(original, iter_id, only))
    elif hasattr(cls, "__iter__"):
        replace(cls, "__iter__", lambda original: _timed_iter(original, iter_id, only))
    return cls if only is None else only


def _timed_next(original, iter_id, only):
    @functools.wraps(original)
    def __next__(self):
        t0, c0 = _mono(), _thread_time()
        result = original(self)
        if only is None or self is only:
            _note(iter_id, t0, c0)
        return result

    return __next__


def _timed_iter(original, iter_id, only):
    @functools.wraps(original)
    def __iter__(self):
        iterator = original(self)
        return _Timed(iterator, iter_id) if only is None or self is only else iterator

    return __iter__


class _Timed:
    """Wraps an iterator; everything but ``next`` is the iterator's own."""

    def __init__(self, iterator, iter_id):
        self._iterator, self._iter_id = iterator, iter_id

    def __iter__(self):
        return self

    def __getattr__(self, name):
        return getattr(self._iterator, name)

    def __next__(self):
        t0, c0 = _mono(), _thread_time()
        result = next(self._iterator)
        _note(self._iter_id, t0, c0)
        return result
