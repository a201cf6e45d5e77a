"""Hooks in the worker (and, with num_workers=0, in the trainer): fetch, collate, and the queues of a worker.

``_worker_loop`` and ``_pin_memory_loop`` get stand-ins for their queues, which note when a task came and when a batch
left. The patched functions keep their names, so that spawn and forkserver pickle them by name and a child without the
agent simply finds the original.
"""

import functools
import os
import threading
import time

from . import stacks, state
from .hooks import replace, when_uninstalled
from .writer import NONE

FETCH, TASK, SAMPLE, PIN = 4, 5, 6, 7
_mono = time.monotonic_ns
_thread_time = time.thread_time_ns
_process_time = time.process_time_ns

#: Samples are timed one by one only where a sample takes at least this long: timing one costs about 0.1 us.
_PER_SAMPLE_NS = 20_000
_MAX_LEAVES = 512
#: What a fetcher remembers of its last batch, in ns.
COLLATE, PER_SAMPLE = 0, 1


class _Here:
    """This process's worker, if it is one. ``task`` is the batch number it works on."""

    worker_1 = 0
    task = NONE
    resumes = 0
    got_ns = 0
    run_queue_fd = -1
    run_queue_thread = 0


def patch(module):
    """Called with ``torch.utils.data.dataloader``."""
    utils = module._utils
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        fetcher = getattr(utils.fetch, name)
        replace(fetcher, "fetch", _fetch)
    replace(utils.fetch._BaseDatasetFetcher, "__init__", _fetcher_init)
    replace(utils.worker, "_worker_loop", _worker_loop)
    replace(utils.pin_memory, "_pin_memory_loop", _pin_memory_loop)
    when_uninstalled(_close_run_queue)


def _close_run_queue():
    """In a forked child, where the descriptor would tell of the parent's thread, and when unhooked."""
    fd, _Here.run_queue_fd, _Here.run_queue_thread = _Here.run_queue_fd, -1, 0
    # A program that becomes a daemon closes every descriptor: then this number may be a file of its own by now.
    if fd >= 0 and os.readlink("/proc/self/fd/%d" % fd).endswith("/schedstat"):
        os.close(fd)


state._at_fork_child.append(_close_run_queue)


def run_queue_ns():
    """Time the main thread was ready but had no core, since its start; None in others: no sampler sees them."""
    here = threading.get_ident()
    if _Here.run_queue_thread != here:
        if _Here.run_queue_thread or here != threading.main_thread().ident:
            return None
        _Here.run_queue_thread = here
        try:
            path = "/proc/self/task/%d/schedstat" % threading.get_native_id()
            _Here.run_queue_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            state.failed("schedstat", error)
    if _Here.run_queue_fd < 0:
        return None
    try:
        return int(os.pread(_Here.run_queue_fd, 64, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return None


class _TimedIndices(list):
    """A batch of indices that notes, while the fetcher walks over it, which sample took longest."""

    def __iter__(self):
        worst, worst_at, worst_index = -1, 0, None
        last = _mono()
        for index in list.__iter__(self):
            yield index
            now = _mono()
            if now - last > worst:
                worst, worst_at, worst_index = now - last, last, index
            last = now
        self.worst = (worst_at, worst, worst_index)


def _fetcher_init(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if state.writer is not None and callable(getattr(self, "collate_fn", None)):
            # Not the fetcher itself: a cycle would keep the dataset, and what its generators hold, until a collection.
            self._headrace_ns = spent = [0, 0]
            self.collate_fn = _timed_collate(self.collate_fn, spent)

    return __init__


def _timed_collate(collate, spent):
    def timed(data):
        t0 = _mono()
        try:
            return collate(data)
        finally:
            spent[COLLATE] += _mono() - t0

    return timed


def _fetch(original):
    @functools.wraps(original)
    def fetch(self, index):
        w = state.writer
        if w is None:
            return original(self, index)
        spent = self.__dict__.get("_headrace_ns") or [0, 0]
        spent[COLLATE] = 0
        given = index
        if spent[PER_SAMPLE] > _PER_SAMPLE_NS and type(index) is list and _walks(self):
            given = _TimedIndices(index)
        stacks.before_fetch()
        q0 = run_queue_ns()
        p0 = _process_time()
        c0 = _thread_time()
        t0 = _mono()
        try:
            return original(self, given)
        finally:
            t1 = _mono()
            c1 = _thread_time()
            stacks.after_fetch()
            _note_fetch(self, spent, given, t0, t1, c1 - c0, _process_time() - p0, q0)

    return fetch


def _walks(fetcher):
    """Whether the fetcher walks over the indices one by one, rather than handing them to the dataset."""
    dataset = getattr(fetcher, "dataset", None)
    return getattr(fetcher, "auto_collation", False) and not getattr(dataset, "__getitems__", None)


@state.quiet("fetch")
def _note_fetch(fetcher, spent, given, t0, t1, on_cpu, process_cpu, q0):
    w = state.writer
    if w is None:
        return
    q1 = run_queue_ns() if q0 is not None else None
    num = len(given) if getattr(fetcher, "auto_collation", False) and hasattr(given, "__len__") else 1
    collate = spent[COLLATE]
    spent[PER_SAMPLE] = (t1 - t0 - collate) // max(num, 1)
    w.event(FETCH, t0, t1, _Here.worker_1, _Here.task, collate, on_cpu, NONE if q1 is None else max(q1 - q0, 0))
    at, worst, index = getattr(given, "worst", (t0, 0, None))
    number = index if type(index) is int and index >= 0 else NONE
    w.event(SAMPLE, at, at + worst, _Here.worker_1, _Here.task, number, num, process_cpu)


class _IndexQueue:
    """Stands in for a worker's index queue: notes when an index came."""

    def __init__(self, queue):
        self._queue = queue

    def __getattr__(self, name):
        return getattr(self._queue, name)

    def get(self, *args, **kwargs):
        item = self._queue.get(*args, **kwargs)
        _Here.got_ns = _mono()
        if type(item) is tuple and type(item[0]) is int:
            _Here.task = item[0]
        elif type(item).__name__ == "_ResumeIteration":
            _Here.resumes += 1
        return item


class _ResultQueue:
    """Stands in for a worker's result queue: notes when a batch was handed over, how many bytes and tensors."""

    def __init__(self, queue):
        self._queue = queue
        self._leaves = 0
        self._skip = 0
        self._size = (0, 0)

    def __getattr__(self, name):
        return getattr(self._queue, name)

    def put(self, item, *args, **kwargs):
        w = state.writer
        if w is None or type(item) is not tuple or type(item[0]) is not int:
            return self._queue.put(item, *args, **kwargs)
        size = self._measure(item[1])
        self._queue.put(item, *args, **kwargs)
        w.event(TASK, _Here.got_ns, _mono(), _Here.worker_1, item[0], _Here.resumes, size[0], size[1])
        return None

    def _measure(self, data):
        # Walking many leaves costs: a batch of hundreds of tensors is measured once in sixteen.
        self._skip += 1
        if self._size[1] <= 32 or not self._skip % 16:
            try:
                self._size = _bytes_and_tensors(data)
            except Exception as error:  # noqa: BLE001 - a batch may be any object
                state.failed("size", error)
        return self._size


def _bytes_and_tensors(data):
    total, tensors, leaves, todo = 0, 0, 0, [data]
    while todo and leaves < _MAX_LEAVES:
        leaves += 1
        item = todo.pop()
        if isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        elif hasattr(item, "untyped_storage"):
            tensors += 1
            total += item.numel() * item.element_size()
        elif hasattr(item, "nbytes"):
            total += int(item.nbytes)
    return total, tensors + len(todo)


def _worker_loop(original):
    @functools.wraps(original)
    def _worker_loop(*args, **kwargs):
        if state.writer is not None and len(args) > 10 and not kwargs:
            args = _enter_worker(args) or args
        try:
            return original(*args, **kwargs)
        finally:
            w = state.writer
            if w is not None:
                w.finish()

    return _worker_loop


@state.quiet("worker")
def _enter_worker(args):
    index_queue, result_queue, worker_id = args[2], args[3], args[10]
    if not (hasattr(index_queue, "get") and hasattr(result_queue, "put") and type(worker_id) is int):
        raise TypeError("the arguments of _worker_loop are not in the known order")
    _Here.worker_1, _Here.task, _Here.resumes, _Here.got_ns = worker_id + 1, NONE, 0, _mono()
    state.meta("worker", worker=worker_id, t_ns=_mono())
    return (*args[:2], _IndexQueue(index_queue), _ResultQueue(result_queue), *args[4:])


class _PinIn:
    """Stands in for the result queue in the pin thread."""

    def __init__(self, queue, seen):
        self._queue, self._seen = queue, seen

    def __getattr__(self, name):
        return getattr(self._queue, name)

    def get(self, *args, **kwargs):
        item = self._queue.get(*args, **kwargs)
        self._seen[0] = _mono()
        return item


class _PinOut:
    def __init__(self, queue, seen, queue_id):
        self._queue, self._seen, self._id = queue, seen, queue_id

    def __getattr__(self, name):
        return getattr(self._queue, name)

    def put(self, item, *args, **kwargs):
        t1 = _mono()
        self._queue.put(item, *args, **kwargs)
        if type(item) is tuple and type(item[0]) is int:
            state.event(PIN, self._seen[0], t1, self._id, item[0])


def _pin_memory_loop(original):
    @functools.wraps(original)
    def _pin_memory_loop(in_queue, out_queue, *args, **kwargs):
        if state.writer is not None:
            seen = [_mono()]
            queue_id = id(in_queue)
            in_queue, out_queue = _PinIn(in_queue, seen), _PinOut(out_queue, seen, queue_id)
        return original(in_queue, out_queue, *args, **kwargs)

    return _pin_memory_loop
