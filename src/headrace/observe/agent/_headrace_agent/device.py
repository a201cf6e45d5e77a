"""The device's clock around ``next()``, and copies and waits of the host. All of it only once CUDA is in use.

Never synchronises: an event is recorded on the current stream before and after ``next()``; what lies between them on
the device's clock is time in which the stream had run dry (nothing can be put on it while the trainer is in
``next()``). The pair is read in a later step, when it has completed by itself.
NOT YET MEASURED on a GPU.
"""

import collections
import functools
import sys
import time
import types

from . import state, steps
from .hooks import on_import, replace
from .sites import user_site
from .writer import NONE

COPY, SYNC, DEVICE = 10, 11, 12
_mono = time.monotonic_ns
_MAX_PENDING = 64
#: A wait below this is a batch that was ready: long enough for the device to pass the event, short beside a step.
_READY_NS = 300_000

_cuda = None
_pool: list[tuple] = []  # pairs of events to use again
_pending: collections.deque[tuple] = collections.deque()  # (pair, iter, batches before, had run dry)
_site_ids: dict[str, int] = {}


@on_import("torch.cuda")
def cuda_in_use(module):
    if not hasattr(module, "_lazy_init"):
        raise AttributeError("torch.cuda._lazy_init")
    replace(module, "_lazy_init", _lazy_init)


def _lazy_init(original):
    @functools.wraps(original)
    def _lazy_init():
        original()
        if _cuda is None and state.writer is not None:
            _begin()

    return _lazy_init


@state.quiet("cuda")
def _begin():
    global _cuda
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        _cuda = torch.cuda
        _patch_tensor(torch)


def before_next():
    """Records the first event of a pair; None without a device in use, or while a graph is captured."""
    if _cuda is None or state.writer is None:
        return None
    return _record_first()


@state.quiet("device clock")
def _record_first():
    # before_next() asked whether there is _cuda.
    if _cuda.is_current_stream_capturing() or len(_pending) >= _MAX_PENDING:  # type: ignore[union-attr]  # see above
        return None
    pair = _pool.pop() if _pool else (_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True))  # type: ignore[union-attr]  # see above
    pair[0].record()
    return pair


@state.quiet("device clock")
def after_next(pair, iter_id, delivered, wait_ns):
    """Records the second event and reads those pairs that have completed meanwhile.

    Also notes whether the device had run dry by the time the trainer asked for a batch that was ready: then the host
    does not issue work fast enough, however full the step looks.
    """
    ready = wait_ns < _READY_NS
    drained = int(pair[0].query()) if ready else NONE
    pair[1].record()
    _pending.append((pair, iter_id, delivered, drained))
    while _pending and _pending[0][0][1].query():
        done, iter_of, number, dry = _pending.popleft()
        now = _mono()
        state.event(DEVICE, now, now, iter_of, number, int(done[0].elapsed_time(done[1]) * 1e6), dry)
        _pool.append(done)


def _site_id():
    site = user_site(4)[0]
    known = _site_ids.get(site)
    if known is None:
        known = _site_ids[site] = len(_site_ids) + 1
        state.meta("site", site=known, text=site)
    return known


def _patch_tensor(torch):
    tensor = torch.Tensor
    for name, make in (("to", _copy), ("cuda", _copy), ("item", _sync), ("tolist", _sync), ("cpu", _sync)):
        replace(tensor, name, functools.partial(_method, make))
    replace(torch.cuda, "synchronize", _sync_call)


def _method(make, original):
    return _Method(original, make(original))


class _Method:
    """Stands in for a method of Tensor and equals it.

    torch hands the method found on Tensor to ``__torch_function__``, and subclasses look it up in tables that hold the
    original: torchvision's images would come out of ``.to()`` as plain tensors.
    """

    def __init__(self, original, call):
        self._original, self._call = original, call
        functools.update_wrapper(self, original)

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self._call, instance)

    def __eq__(self, other):
        return other is self or other is self._original

    def __hash__(self):
        return hash(self._original)

    def __reduce__(self):
        return self._original.__reduce__()


def _copy(original):
    @functools.wraps(original)
    def copy(self, *args, **kwargs):
        if steps._compiling() or state.writer is None or self.device.type != "cpu":
            return original(self, *args, **kwargs)
        t0 = _mono()
        result = original(self, *args, **kwargs)
        if result.device.type == "cuda":
            _note_copy(self, kwargs, args, t0, _mono())
        return result

    return copy


@state.quiet("copy")
def _note_copy(tensor, kwargs, args, t0, t1):
    asked = kwargs.get("non_blocking", False) or True in args
    flags = int(tensor.is_pinned()) | (2 if asked else 0)
    state.event(COPY, t0, t1, tensor.numel() * tensor.element_size(), flags, _site_id())


def _sync(original):
    @functools.wraps(original)
    def sync(self, *args, **kwargs):
        if steps._compiling() or state.writer is None or self.device.type != "cuda":
            return original(self, *args, **kwargs)
        t0 = _mono()
        result = original(self, *args, **kwargs)
        _note_sync(t0, _mono())
        return result

    return sync


def _sync_call(original):
    @functools.wraps(original)
    def synchronize(*args, **kwargs):
        t0 = _mono()
        result = original(*args, **kwargs)
        if state.writer is not None:
            _note_sync(t0, _mono())
        return result

    return synchronize


@state.quiet("sync")
def _note_sync(t0, t1):
    state.event(SYNC, t0, t1, 0, 0, _site_id(), NONE)
