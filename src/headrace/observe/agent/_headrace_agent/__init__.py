"""The agent: what is hooked inside the user's processes, and how it is unhooked.

Who runs where:

    trainer      main thread   DataLoader.__iter__, __next__, _get_data, backward, optimizer.step
                 pin thread    the queues of _pin_memory_loop
                 stack thread  only while sampling (a few seconds); ends before any fork
    worker       main thread   the queues of _worker_loop, fetch, collate
                 stack thread  as above

Each process has one writer of its own (``writer``); nobody waits on anybody. Hooks never raise: on its own failure
the agent unhooks itself, says so once in its ``.meta`` file, and the program goes on.
Standard library only; works without headrace installed, on Python 3.10 to 3.14.
"""

import os

from . import state
from .hooks import install, uninstall

__all__ = ["note_simulated", "start", "stop"]


def start(run_dir, data=None):
    """Begins observing this process and, by fork or environment, its children. Neither imports torch nor blocks."""
    if state.writer is not None:
        return
    state.begin(run_dir, data or os.environ.get("HEADRACE_DATA"))
    if state.writer is not None:
        install()


def stop(reason="stopped"):
    """Takes every hook out of this process again. Idempotent."""
    uninstall()
    state.end(reason)


def note_simulated():
    """Called by headrace's simulated device: steps of this process are not those of a real one."""
    if state.writer is not None:
        state.meta("simulated")
