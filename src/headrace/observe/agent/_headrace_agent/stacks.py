"""A sampling look at stacks: a few Hz for a few seconds, only when the wait is worth explaining.

The trainer that waits asks for it in the shared control cells; every worker that sees the request while it fetches
starts a thread of its own for that long. Without a DataLoader the trainer samples its own main thread between
optimizer steps. A sample is the stack of the one observed thread and what that thread is blocked on
(``/proc/self/task/TID/syscall``). The thread ends before this process forks.
"""

import os
import sys
import threading
import time

from . import state
from .blocked import blocked_on
from .sites import is_library, text
from .writer import CELL_NUM_STEPS, Control

_mono = time.monotonic_ns
_RATE_S = 0.1
_WINDOW_NS = 4_000_000_000
_MAX_FRAMES = 24


class _Watch:
    """The trainer's view: how much it waited, and whether it asked. One instance: writing to a class is slow."""

    __slots__ = ("asked", "first_ns", "look_ns", "optimizer_steps", "steps", "wait_ns")

    def __init__(self):
        self.forget()

    def forget(self):
        self.first_ns = self.look_ns = self.wait_ns = self.steps = self.asked = self.optimizer_steps = 0


watch = _Watch()
_fetching: int | None = None  # ident of the thread that is fetching now
_sampler: "_Sampler | None" = None


def after_next(w, t0, t1):
    """Called by the trainer after each batch: counts steps; every 50 ms it looks whether there is anything to do."""
    watch.steps += 1
    watch.wait_ns += t1 - t0
    if t1 >= watch.look_ns:
        look_up(w, t1)


def look_up(w, now):
    """The rest of ``after_next``, for a caller that counts by itself."""
    cells = state.control.cells
    most = cells[Control.MAX_STEPS]
    watch.look_ns = 0 if most else now + 50_000_000  # with --steps every step has to be counted in time
    if not watch.first_ns:  # the first wait is an epoch's start, and says nothing of the rest
        watch.first_ns, watch.steps, watch.wait_ns = now, 0, 0
        return
    w.put(CELL_NUM_STEPS, watch.steps)
    if watch.asked < 2 and watch.steps >= 6 and _worth_it(now):
        watch.asked += 1
        cells[Control.SAMPLE_UNTIL_NS] = now + _WINDOW_NS
    if most and watch.steps >= most + cells[Control.WARMUP_STEPS]:
        cells[Control.STOP] = 1
    if cells[Control.STOP]:
        _step_aside()


def _worth_it(now):
    elapsed = now - watch.first_ns
    wait_for = 1_000_000_000 if not watch.asked else 30_000_000_000
    return elapsed > wait_for and watch.wait_ns > elapsed // 20


@state.quiet("stop")
def _step_aside():
    from . import stop

    stop("steps")


def before_fetch():
    global _fetching
    cells = state.control.cells
    if cells[Control.STOP]:
        _step_aside()  # the trainer has seen enough: so have its workers
        return
    _fetching = threading.get_ident()
    until = cells[Control.SAMPLE_UNTIL_NS]
    if until and _sampler is None and _mono() < until:
        _start(until, _fetching, threading.get_native_id(), only_fetch=True)


def after_fetch():
    global _fetching
    _fetching = None


def after_step(w):
    """After an optimizer step of a program without any loader so far: sample what runs between the steps."""
    watch.optimizer_steps += 1
    if watch.optimizer_steps != 3:
        _count_loaderless(w)
        return
    if _sampler is None and threading.current_thread() is threading.main_thread():
        _start(_mono() + 10_000_000_000, threading.get_ident(), threading.get_native_id(), only_fetch=False)


def _count_loaderless(w):
    w.add(CELL_NUM_STEPS, 1)
    cells = state.control.cells
    most = cells[Control.MAX_STEPS]
    if most and watch.optimizer_steps >= most + cells[Control.WARMUP_STEPS]:
        cells[Control.STOP] = 1
        _step_aside()


def _start(until, ident, tid, only_fetch):
    global _sampler
    _sampler = _Sampler(until, ident, tid, only_fetch)
    try:
        _sampler.start()
    except Exception as error:  # noqa: BLE001 - no thread to be had: go on without stacks
        _sampler = None
        state.failed("stacks", error)


class _Sampler(threading.Thread):
    def __init__(self, until, ident, tid, only_fetch):
        super().__init__(name="headrace-stacks", daemon=True)
        self.until, self.observed, self.tid, self.only_fetch = until, ident, tid, only_fetch
        self.stop = threading.Event()
        self.rows = {}
        self.began = _mono()

    def run(self):
        global _sampler
        try:
            last = _mono()
            while not self.stop.wait(_RATE_S if self.only_fetch else _RATE_S / 2) and _mono() < self.until:
                self._look()
                if _mono() - last > 1_000_000_000:
                    self._flush()
                    last = _mono()
            self._flush()
        except Exception as error:  # noqa: BLE001 - the border of a thread
            state.failed("stacks", error)
        finally:
            if _sampler is self:
                _sampler = None  # the next request may start another

    def _look(self):
        if self.only_fetch and _fetching != self.observed:
            return
        frame = sys._current_frames().get(self.observed)
        if frame is None:
            return
        key = (blocked_on(self.tid), *_stack(frame))
        self.rows[key] = self.rows.get(key, 0) + 1

    def _flush(self):
        rows, self.rows = self.rows, {}
        if rows:
            listed = [[count, key[0], list(key[1:])] for key, count in rows.items()]
            state.meta("stacks", fetch=self.only_fetch, t0=self.began, t1=_mono(), tid=self.tid, rows=listed)


def _stack(frame):
    """Innermost first: ``file:line|function``, with a ``*`` before lines of the user's own."""
    out: list[str] = []
    while frame is not None and len(out) < _MAX_FRAMES:
        code = frame.f_code
        mark = "" if is_library(code.co_filename) else "*"
        out.append(mark + text(code.co_filename, frame.f_lineno) + "|" + getattr(code, "co_qualname", code.co_name))
        frame = frame.f_back
    return out


def _end_before_fork():
    """A fork of a process with threads is a risk (and a warning since Python 3.12): ours is gone by then."""
    global _sampler
    sampler = _sampler
    if sampler is None or sampler is threading.current_thread():
        return
    sampler.stop.set()
    sampler.join(1.0)
    _sampler = sampler if sampler.is_alive() else None
    # Python counts the kernel's threads before it warns, and a joined thread is there for some microseconds more.
    for _ in range(1000):
        if not os.path.exists("/proc/self/task/%d" % sampler.native_id):  # type: ignore[str-format]  # it was started
            break


def _forget_in_child():
    global _sampler, _fetching
    _sampler = _fetching = None
    watch.forget()


state._before_fork.append(_end_before_fork)
state._at_fork_child.append(_forget_in_child)
state.at_end.append(watch.forget)


def shut():
    """Ends the sampling thread, when there is one."""
    _end_before_fork()
