"""Starting the workers of a loader, under any start method.

fork                trainer --fork--> helper --fork--> workers     everything is inherited
spawn, forkserver   trainer --Process--> worker                    everything is pickled, once for each worker
threads             trainer --Thread--> worker                     everything is shared
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

from headrace.host import children
from headrace.loader.control import ControlPage
from headrace.loader.crew import Crew, ForkCrew, ProcessCrew
from headrace.loader.entry import Descriptor, Guard, Sealed, run_process
from headrace.loader.helper import HelperJob
from headrace.loader.pool import Pool
from headrace.loader.ring import Ring, close_rings_in_child
from headrace.loader.setup import WorkerSetup
from headrace.loader.threads import ThreadCrew
from headrace.loader.worker import run_worker

#: Pools of this process, for the children that inherit their descriptors.
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def start_pool(
    setup: WorkerSetup, ring: Ring, context: Any, *, is_replacing: bool, on_close: Callable[[Ring], None]
) -> Pool:
    """Start the workers of a loader. Returns before they run; the caller closes the pool.

    Args:
        setup: What the workers get.
        ring: Slots, from an earlier pool of this loader where there was one.
        context: A multiprocessing context; None: the interpreter's default.
        is_replacing: Whether dead workers are replaced and their tasks repeated.
        on_close: Takes the ring back.
    """
    _watch_forks()
    context = context if context is not None else multiprocessing.get_context()
    page, stack_fds = ControlPage.create(), os.pipe()
    make_crew: Callable[..., Crew] = _fork_crew if context.get_start_method() == "fork" else _process_crew
    if setup.is_thread:
        make_crew = _thread_crew
    try:
        crew = make_crew(setup, page, stack_fds[1], context, is_replacing)
    except BaseException:
        page.close()
        children.close_all(stack_fds)
        raise
    pool = Pool(
        crew,
        page,
        stack_fds,
        ring,
        setup.num_workers,
        is_replacing=is_replacing,
        is_stale_dropped=setup.seeds == "place",
        on_close=on_close,
    )
    _pools.add(pool)
    return pool


def _fork_crew(setup: WorkerSetup, page: ControlPage, stack_fd: int, _context: Any, is_replacing: bool) -> Crew:
    def run(number: int, sock: socket.socket) -> None:
        run_worker(number, sock, page, setup, stack_fd)

    return ForkCrew(HelperJob(run, is_replacing))


def _thread_crew(setup: WorkerSetup, page: ControlPage, *_: Any) -> Crew:
    return ThreadCrew(lambda number, sock: run_worker(number, sock, page, setup, -1))


def _close_inherited() -> None:
    """In a forked child, the program's own too: let go of what the trainer's pools hold.

    Slots and sockets would outlive the pools, and an iterator that is used in the child would take the trainer's
    messages; it says that its workers are gone, and a loader starts new ones.
    """
    for pool in list(_pools):
        pool.close_in_child()
    close_rings_in_child()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_close_inherited)


def _process_crew(setup: WorkerSetup, page: ControlPage, stack_fd: int, context: Any, _is_replacing: bool) -> Crew:
    trainer_fd = os.pidfd_open(os.getpid())

    def make_args(number: int, sock: socket.socket) -> tuple[Any, ...]:
        return Guard(trainer_fd), number, sock, Descriptor(page.fd), Descriptor(stack_fd), Sealed(setup)

    return ProcessCrew(context, run_process, make_args, trainer_fd)
