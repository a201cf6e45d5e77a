"""``--live``: one status line on stderr while the program runs.

    agents (in the program) --mapped .ev files--> reader (a thread of headrace) --> status line

The reader only reads: it takes no lock and asks nothing of the writers. On a terminal the line is written over once a
second; elsewhere a plain line appears every ten seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from headrace.core import units
from headrace.run import talk
from headrace.run.tail import EventTail, Pace

_PERIOD_S = 1.0
_PLAIN_PERIOD_S = 10.0
#: The cause comes from analysing the whole run so far, in headrace's process; it may take this share of one core.
_CAUSE_CPU_FRAC = 0.03
_CAUSE_PERIOD_S = 10.0
_RETURN_AND_ERASE = "\r\x1b[K"


class Live:
    """Shows the status line from ``start`` to ``stop``, on a thread of its own; what fails in it ends it silently.

    Args:
        run_dir: Where the agents write.
        find_cause: Analyses the run so far; called on the thread, rarely.
    """

    def __init__(self, run_dir: Path, find_cause: Callable[[], str | None]) -> None:
        self._tail = EventTail(run_dir)
        self._find_cause = find_cause
        self._cause: str | None = None
        self._next_cause_s = time.monotonic() + _CAUSE_PERIOD_S
        self._terminal = talk.is_terminal()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-live", daemon=True)

    def start(self) -> None:
        """Begins; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Erases the line and ends. Waits for an analysis in progress at most half a second."""
        self._stop.set()
        self._thread.join(0.5)
        if self._terminal:
            talk.write(_RETURN_AND_ERASE)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S if self._terminal else _PLAIN_PERIOD_S):
            try:
                text = status_text(self._tail.read(), self._cause)
                self._show(text)
                self._look_for_cause()
            except Exception:  # noqa: BLE001 - boundary of the thread: the line is a convenience, the report says what is broken
                return

    def _show(self, text: str) -> None:
        if self._stop.is_set():
            return
        if self._terminal:
            # One column short, because some terminals wrap at the last one and the line could not be erased.
            talk.write(_RETURN_AND_ERASE + text[: talk.width() - 1])
        else:
            talk.write(text + "\n")

    def _look_for_cause(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_cause_s or self._stop.is_set():
            return
        cpu_s = time.thread_time()
        self._cause = self._find_cause()
        cost_s = time.thread_time() - cpu_s
        self._next_cause_s = time.monotonic() + max(_CAUSE_PERIOD_S, cost_s / _CAUSE_CPU_FRAC)


def status_text(pace: Pace | None, cause: str | None) -> str:
    """The status line: step time, stall, cause. Pure."""
    if pace is None:
        return "headrace: no steps seen yet"
    ranks = f" ({pace.num_trainers} trainers)" if pace.num_trainers > 1 else ""
    step, stall = units.duration(pace.step_ns), units.percent(pace.stall_frac)
    return f"headrace: step {step}, stall {stall}, cause {cause or '...'}{ranks}"
