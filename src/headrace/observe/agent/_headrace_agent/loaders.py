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
STOP, ERROR = 1, 2

_mono = time.monotonic_ns
_thread_time = time.thread_time_ns
_sites: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # loader -> site
#: id(dataset) -> (weak reference, first site): frameworks make loaders again.
_dataset_sites: dict[int, tuple] = {}
_loader_ids: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_iterators: weakref.WeakSet = weakref.WeakSet()
_hook_every = 32
_inside = threading.local()


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
        for name in ("_headrace_id", "_headrace_epochs", "_headrace_resumes", "_headrace_loader"):
            iterator.__dict__.pop(name, None)
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
        t0 = _mono()
        try:
            iterator = original(self)
        finally:
            _inside.iter = outer
        _note_epoch(self, iterator, t0, _mono())
        return iterator

    return __iter__


@state.quiet("epoch")
def _note_epoch(loader, iterator, t0, t1):
    seen = iterator.__dict__.get("_headrace_epochs")
    if seen is None:
        return
    iterator._headrace_epochs = seen + 1
    loader_id = _loader_id(loader)
    if seen == 0:
        _describe_iterator(iterator, loader_id)
    state.event(EPOCH, t0, t1, iterator._headrace_id, loader_id, int(seen > 0), seen)


def _iterator_init(original):
    @functools.wraps(original)
    def __init__(self, loader, *args, **kwargs):
        if state.writer is not None:
            _adopt(self, loader)
        return original(self, loader, *args, **kwargs)

    return __init__


@state.quiet("iterator")
def _adopt(iterator, loader):
    iterator._headrace_id = state.next_id()
    iterator._headrace_epochs = 0
    iterator._headrace_resumes = 0
    _iterators.add(iterator)
    iterator._headrace_loader = _loader_id(loader)


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
    state.meta("iter", iter=iterator._headrace_id, loader=loader_id, workers=pids, queue=queue_id, rank=_rank())


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
        if not first_iter and "_headrace_resumes" in self.__dict__:
            self._headrace_resumes += 1
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
                mine = self.__dict__
                w.event(RECV, t0, _mono(), mine.get("_headrace_id", 0), idx, mine.get("_headrace_resumes", 0))
        return result

    return _get_data


def _next(original):
    @functools.wraps(original)
    def __next__(self):
        w = state.writer
        if w is None:
            return original(self)
        mine = self.__dict__
        iter_id = mine.get("_headrace_id") or _adopt_late(self) or 0
        delivered = mine.get("_num_yielded", 0)
        if not delivered and not mine.get("_headrace_epochs", 1):
            _note_unasked(self)
        marks = device.before_next()
        c0 = _thread_time()
        t0 = _mono()
        try:
            data = original(self)
        except BaseException as error:
            t1 = _mono()
            flag = STOP if isinstance(error, StopIteration) else ERROR
            state.event(NEXT, t0, t1, iter_id, delivered, flag, _thread_time() - c0, NONE)
            raise
        t1 = _mono()
        received = mine.get("_rcvd_idx")
        w.event(NEXT, t0, t1, iter_id, delivered, 0, _thread_time() - c0, NONE if received is None else received - 1)
        if marks is not None:
            device.after_next(marks, iter_id, delivered, t1 - t0)
        stacks.after_next(w, t0, t1)
        if delivered % _hook_every == _hook_every - 1:
            w.add(CELL_HOOK_NS, _hook_every * (_mono() - t1 + 500))
        return data

    return __next__


@state.quiet("iterator")
def _note_unasked(iterator):
    """An iterator that no DataLoader.__iter__ handed out (fastai makes them itself)."""
    now = _mono()
    iterator._headrace_epochs = 1
    _describe_iterator(iterator, iterator._headrace_loader)
    state.event(EPOCH, now, now, iterator._headrace_id, iterator._headrace_loader, 0, 0)


@state.quiet("iterator")
def _adopt_late(iterator):
    """An iterator older than our hooks (``headrace.observe()`` in the middle of an epoch)."""
    iterator._headrace_id = state.next_id()
    iterator._headrace_epochs = 1
    iterator._headrace_resumes = 0
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
    return iterator._headrace_id
