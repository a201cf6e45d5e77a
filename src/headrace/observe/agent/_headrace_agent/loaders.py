"""Hooks on torch.utils.data: iterators in the trainer, and what the trainer receives.

Classes are patched, never instances, so that subclasses, persistent workers and frameworks' wrappers are covered, and
iterators keep their type and their ``_workers``.
"""

import functools
import sys
import threading
import time
import weakref

from . import device, stacks, state, workers
from .hooks import on_import, replace, when_uninstalled
from .sites import user_site
from .writer import CELL_HOOK_NS, NONE

NEXT, EPOCH, RECV, PIN = 1, 2, 3, 7
STOP, ERROR, QUEUED_SHIFT = 1, 2, 8

_mono = time.monotonic_ns
_thread_time = time.thread_time_ns
_sites: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # loader -> site
#: id(dataset) -> (weak reference, first site): frameworks make loaders again.
_dataset_sites: dict[int, tuple] = {}
_loader_ids: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_iterators: weakref.WeakSet = weakref.WeakSet()
_hook_every = 32
#: Asking for a thread's CPU time is a system call: not where the batches are ready. Its time in the run queue is a
#: file of the kernel: only where waits are long beside reading it.
_SHORT_NS, _LONG_NS = 50_000, 1_000_000
_inside = threading.local()


class _UNKNOWN:
    """Stands for an iterator of which nothing could be remembered."""

    id, epochs, has_workers, wait_ns = 0, 1, False, _LONG_NS


class _Seen:
    """What is remembered of an iterator, on it, as ``_headrace``: ids, and how often it began and resumed.

    Read as an attribute, never through ``__dict__``: Python would give the iterator a dictionary of its own then, and
    torch's every access to it becomes slower.
    """

    __slots__ = ("epochs", "has_workers", "id", "loader_id", "received", "resumes", "wait_ns")

    def __init__(self, iterator, epochs=0):
        self.id, self.epochs, self.resumes, self.loader_id = state.next_id(), epochs, 0, 0
        self.has_workers = hasattr(type(iterator), "_get_data")
        self.received, self.wait_ns = NONE, _LONG_NS


def _seen(iterator):
    return getattr(iterator, "_headrace", None)


@on_import("torch.utils.data.dataloader")
def loader_site(module):
    replace(module.DataLoader, "__init__", _init)


@on_import("torch.utils.data.dataloader")
def loader_iter(module):
    replace(module.DataLoader, "__iter__", _iter)
    when_uninstalled(_forget)


def _forget():
    """Ids belong to one writer: the next one, here or in a forked child, has to describe everything again."""
    _loader_ids.clear()
    for iterator in list(_iterators):
        iterator.__dict__.pop("_headrace", None)
    _iterators.clear()


state._at_fork_child.append(_loader_ids.clear)


@on_import("torch.utils.data.dataloader")
def iterator_next(module):
    base = module._BaseDataLoaderIter
    replace(base, "__init__", _iterator_init)
    replace(base, "_reset", _reset)
    replace(base, "__next__", _next)


@on_import("torch.utils.data.dataloader")
def iterator_receive(module):
    replace(module._MultiProcessingDataLoaderIter, "_get_data", _get_data)


@on_import("torch.utils.data.dataloader")
def worker_loop(module):
    workers.patch(module)


@on_import("torch.utils.data.dataloader")
def torch_facts(_module):
    torch = sys.modules["torch"]
    version = getattr(getattr(torch, "version", None), "__version__", None)
    state.meta("torch", version=version, cuda=getattr(getattr(torch, "version", None), "cuda", None))


def _init(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if state.writer is not None:
            _remember_site(self)

    return __init__


@state.quiet("site")
def _remember_site(loader):
    if loader in _sites:
        return
    site, direct = user_site(3)
    key = id(loader.dataset)
    known = _dataset_sites.get(key)
    if known is not None and not direct:
        site = known[1]
    elif known is None:
        try:
            _dataset_sites[key] = (weakref.ref(loader.dataset, lambda _: _dataset_sites.pop(key, None)), site)
        except TypeError:
            pass  # lists and the like cannot be referred to weakly
    _sites[loader] = site


def _iter(original):
    @functools.wraps(original)
    def __iter__(self):
        outer = getattr(_inside, "iter", None)
        if state.writer is None or outer is self:
            return original(self)
        _inside.iter = self
        q0 = workers.run_queue_ns()
        t0 = _mono()
        try:
            iterator = original(self)
        finally:
            _inside.iter = outer
        _note_epoch(self, iterator, t0, _mono(), q0)
        return iterator

    return __iter__


@state.quiet("epoch")
def _note_epoch(loader, iterator, t0, t1, q0):
    seen = _seen(iterator)
    if seen is None:
        return
    epoch, seen.epochs = seen.epochs, seen.epochs + 1
    loader_id = _loader_id(loader)
    if epoch == 0:
        _describe_iterator(iterator, loader_id)
    q1 = None if q0 is None else workers.run_queue_ns()
    state.event(EPOCH, t0, t1, seen.id, loader_id, int(epoch > 0), epoch, NONE if q1 is None else max(q1 - q0, 0))


def _iterator_init(original):
    @functools.wraps(original)
    def __init__(self, loader, *args, **kwargs):
        if state.writer is not None:
            _adopt(self, loader)
        return original(self, loader, *args, **kwargs)

    return __init__


@state.quiet("iterator")
def _adopt(iterator, loader):
    iterator._headrace = seen = _Seen(iterator)
    _iterators.add(iterator)
    seen.loader_id = _loader_id(loader)


def _loader_id(loader):
    known = _loader_ids.get(loader)
    if known is None:
        known = _loader_ids[loader] = state.next_id()
        _describe(loader, known)
    return known


def _describe(loader, loader_id):
    dataset = loader.dataset
    context = getattr(loader, "multiprocessing_context", None)
    if context is None:
        import multiprocessing

        # Not get_context(): it settles the start method, and the program's own set_start_method() would then fail.
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    else:
        method = context.get_start_method()
    # Never len(loader): torch remembers that it was asked and warns about it later, and samplers may draw in it.
    collate = getattr(loader, "collate_fn", None)
    site = _sites.get(loader)
    state.meta(
        "loader",
        loader=loader_id,
        site=site or user_site(3)[0],
        dataset=type(dataset).__module__ + "." + type(dataset).__qualname__,
        iterable=getattr(loader, "_dataset_kind", 0) == 1,
        batch_size=_batch_size(loader),
        num_workers=getattr(loader, "num_workers", None),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        prefetch_factor=getattr(loader, "prefetch_factor", None),
        persistent_workers=getattr(loader, "persistent_workers", None),
        in_order=getattr(loader, "in_order", True),
        start_method=method,
        collate=getattr(collate, "__qualname__", type(collate).__qualname__),
        guard=_main_guard(),
        pickles=_pickles(loader, method),
    )


def _batch_size(loader):
    if getattr(loader, "batch_size", None) is not None:
        return loader.batch_size
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _main_guard():
    """Whether the main script has a ``__name__`` guard, or needs none (``-m``, console scripts): None when unknown."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path:
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as script:
            text = script.read(1 << 20)
    except OSError:
        return None
    return "__name__" in text and "__main__" in text


def _pickles(loader, method):
    """For spawn and forkserver without workers so far: whether the dataset could be sent. No data is pickled."""
    if method == "fork":
        return True
    for part in (type(loader.dataset), getattr(loader, "collate_fn", None), getattr(loader, "worker_init_fn", None)):
        name = getattr(part, "__qualname__", "")
        if "<lambda>" in name or "<locals>" in name:
            return False
    return None


def _describe_iterator(iterator, loader_id):
    pids = [w.pid for w in getattr(iterator, "_workers", ())]
    queue = getattr(iterator, "_worker_result_queue", None)
    queue_id = id(queue) if queue is not None else 0
    state.meta("iter", iter=iterator._headrace.id, loader=loader_id, workers=pids, queue=queue_id, rank=_rank())


def _rank():
    """The rank in the process group; from the environment while there is no group."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank()
    except Exception as error:  # noqa: BLE001 - a group of a kind that we do not know
        state.failed("rank", error)
    return state.rank()


def _reset(original):
    @functools.wraps(original)
    def _reset(self, loader, first_iter=False):
        seen = None if first_iter else _seen(self)
        if seen is not None:
            seen.resumes += 1
        return original(self, loader, first_iter)

    return _reset


def _get_data(original):
    @functools.wraps(original)
    def _get_data(self):
        t0 = _mono()
        result = original(self)
        w = state.writer
        if w is not None:
            idx = result[0] if type(result) is tuple and result else None
            if type(idx) is int:
                seen = _seen(self)
                if seen is not None:
                    seen.received = idx
                mine = (seen.id, idx, seen.resumes) if seen is not None else (0, idx, 0)
                w.event(RECV, t0, _mono(), *mine)
        return result

    return _get_data


def _next(original):
    watch = stacks.watch

    @functools.wraps(original)
    def __next__(self):
        w = state.writer
        if w is None:
            return original(self)
        try:
            seen, delivered = self._headrace, self._num_yielded
        except AttributeError:
            seen, delivered = _seen(self) or _adopt_late(self) or _UNKNOWN, getattr(self, "_num_yielded", 0)
        iter_id = seen.id
        if not delivered and not seen.epochs:
            _note_unasked(self)
        marks = None if device._cuda is None else device.before_next()
        c0 = 0 if seen.wait_ns < _SHORT_NS else _thread_time()
        q0 = None if seen.wait_ns < _LONG_NS else workers.run_queue_ns()
        t0 = _mono()
        try:
            data = original(self)
        except BaseException as error:
            t1 = _mono()
            flag = STOP if isinstance(error, StopIteration) else ERROR
            state.event(NEXT, t0, t1, iter_id, delivered, flag, _thread_time() - c0 if c0 else NONE, NONE)
            raise
        t1 = _mono()
        seen.wait_ns = wait_ns = t1 - t0
        received = NONE
        if seen.has_workers:
            # Out of order, torch's own number is not that of the batch that it hands out.
            in_order = getattr(self, "_in_order", True)
            received = getattr(self, "_rcvd_idx", NONE + 1) - 1 if in_order else seen.received
        queued = 0 if q0 is None else _queued_since(q0)
        w.event(NEXT, t0, t1, iter_id, delivered, queued, _thread_time() - c0 if c0 else NONE, received)
        if marks is not None:
            device.after_next(marks, iter_id, delivered, wait_ns)
        # As stacks.after_next(), without the call: this runs in every step.
        watch.steps += 1
        watch.wait_ns += wait_ns
        if t1 >= watch.look_ns:
            stacks.look_up(w, t1)
        if delivered % _hook_every == _hook_every - 1:
            w.add(CELL_HOOK_NS, _hook_every * (_mono() - t1 + 500))
        return data

    return __next__


def _queued_since(q0):
    """For the upper bits of NEXT's flags: us in the run queue, and one."""
    q1 = workers.run_queue_ns()
    return 0 if q1 is None else (max(q1 - q0, 0) // 1000 + 1) << QUEUED_SHIFT


@state.quiet("iterator")
def _note_unasked(iterator):
    """An iterator that no DataLoader.__iter__ handed out (fastai makes them itself)."""
    now, seen = _mono(), iterator._headrace
    seen.epochs = 1
    _describe_iterator(iterator, seen.loader_id)
    state.event(EPOCH, now, now, seen.id, seen.loader_id, 0, 0, NONE)


@state.quiet("iterator")
def _adopt_late(iterator):
    """An iterator older than our hooks (``headrace.observe()`` in the middle of an epoch)."""
    iterator._headrace = seen = _Seen(iterator, epochs=1)
    _iterators.add(iterator)
    loader_id = state.next_id()
    state.meta(
        "loader",
        loader=loader_id,
        site=user_site(3)[0],
        dataset=type(iterator._dataset).__module__ + "." + type(iterator._dataset).__qualname__,
        num_workers=iterator._num_workers,
        pin_memory=bool(iterator._pin_memory),
        persistent_workers=iterator._persistent_workers,
        late=True,
    )
    _describe_iterator(iterator, loader_id)
    return seen
