"""After every test: no child process, thread, descriptor, memfd, file map or patch is left."""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
from pathlib import Path

import pytest

#: Descriptors that libraries open once and keep for the life of the process.
KEPT_TARGETS = ("/dev/", "/proc/", "/sys/", "anon_inode:[eventpoll]")
AGENT = "_headrace_agent"
#: torch's classes and modules that headrace hooks; each function in them must be torch's own again.
HOOKED = (
    ("torch.utils.data.dataloader", "DataLoader"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
    ("torch.utils.data.dataloader", "_SingleProcessDataLoaderIter"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter"),
    ("torch.utils.data._utils.fetch", "_MapDatasetFetcher"),
    ("torch.utils.data._utils.fetch", "_IterableDatasetFetcher"),
    ("torch.utils.data._utils.worker", None),
    ("torch.utils.data._utils.pin_memory", None),
    ("torch.autograd", None),
    ("torch.optim.optimizer", "Optimizer"),
    ("torch.serialization", None),
)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Promise of every test: what it starts, opens or patches, it ends, closes and takes back."""
    before = {name: look() for name, look in LOOKS.items()}
    yield
    left = _left(before)
    if left:
        gc.collect()  # what only a reference cycle holds is not a leak
        left = _left(before)
    assert not left, f"left behind: {left}"


def _left(before):
    found = {name: look() - before[name] for name, look in LOOKS.items()}
    return {name: sorted(map(str, new)) for name, new in found.items() if new}


def _children():
    helpers = _multiprocessing_helpers()
    pids = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
        except OSError:  # the thread has ended, or the kernel does not keep this list
            continue
    return pids - helpers


def _multiprocessing_helpers():
    """The resource tracker and the fork server are one each per process and end with it."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    server = sys.modules.get("multiprocessing.forkserver")
    return {
        getattr(getattr(tracker, "_resource_tracker", None), "_pid", None),
        getattr(getattr(server, "_forkserver", None), "_forkserver_pid", None),
    }


def _threads():
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def _descriptors():
    helpers = _helper_descriptors()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if int(name) not in helpers and not target.startswith(KEPT_TARGETS):
            found.add((int(name), target))
    return found


def _helper_descriptors():
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    server = sys.modules.get("multiprocessing.forkserver")
    forkserver = getattr(server, "_forkserver", None)
    return {
        getattr(getattr(tracker, "_resource_tracker", None), "_fd", None),
        getattr(forkserver, "_forkserver_alive_fd", None),
    }


def _maps():
    """Mapped memfds and files of run directories."""
    with open("/proc/self/maps") as lines:
        paths = {line.split(None, 5)[5].strip() for line in lines if line.count("/")}
    return {path for path in paths if "memfd:" in path or path.endswith((".ev", "/control"))}


def _patches():
    found = set()
    for module, owner in HOOKED:
        place = sys.modules.get(module)
        if owner is not None:
            place = getattr(place, owner, None)
        found |= {f"{module}.{owner}.{name}" for name in _foreign_functions(place)}
    return found


def _foreign_functions(place):
    for name, value in list(vars(place).items()) if place is not None else ():
        value = getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType) and AGENT in value.__code__.co_filename:
            yield name


def _import_hooks():
    return {id(finder) for finder in sys.meta_path if AGENT in type(finder).__module__}


LOOKS = {
    "children": _children,
    "threads": _threads,
    "descriptors": _descriptors,
    "maps": _maps,
    "patches": _patches,
    "import hooks": _import_hooks,
    "environment": lambda: {name for name in os.environ if name.startswith("HEADRACE_")},
    "working directory": lambda: {os.getcwd()},
}
