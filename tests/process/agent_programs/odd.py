"""Things that programs do beside training; ``odd.py NAME...`` prints what each of them saw."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class Commands(Numbers):
    """Starts a program, and forks a pool, for a sample."""

    pool = None

    def __getitem__(self, index):
        if self.pool is None:
            self.pool = multiprocessing.get_context("fork").Pool(1)
        word = subprocess.check_output([sys.executable, "-c", f"print({index})"], text=True)
        total = super().__getitem__(index) + int(word) + self.pool.apply(abs, (-index,))
        if index == 15:
            self.pool.terminate()
        return total


def threads():
    """Two loaders, iterated at the same time from two threads."""
    sums = {}

    def iterate(name):
        sums[name] = sum(batch.sum().item() for _ in range(20) for batch in DataLoader(Numbers(), batch_size=2))

    both = [threading.Thread(target=iterate, args=(name,)) for name in "ab"]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return sums


def commands():
    return [batch.tolist() for batch in DataLoader(Commands(), batch_size=8)]


def forks():
    """The child of a plain fork goes on with the parent's iterator and with a loader of its own."""
    loader = DataLoader(Numbers(), batch_size=4)
    iterator = iter(loader)
    first = next(iterator).tolist()
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        rest = [b.tolist() for b in iterator] + [b.tolist() for b in loader]
        os.write(write_end, json.dumps(rest).encode())
        os._exit(0)
    os.wait()
    return [first, json.loads(os.read(read_end, 65536)), [b.tolist() for b in iterator]]


def descriptors():
    """How many descriptors and threads there are in the middle of a loop, and in its workers."""

    class Look(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in DataLoader(Numbers(), batch_size=4):
        here = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    looks = DataLoader(Look(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    workers = [list(map(int, pair)) for pair in looks]
    return [here, workers, [thread.name for thread in threading.enumerate()]]


def daemon():
    """A daemon thread is in the middle of a fetch when the interpreter ends."""
    fetching = threading.Event()

    class Stuck(Numbers):
        def __getitem__(self, index):
            fetching.set()
            threading.Event().wait()

    threading.Thread(target=lambda: next(iter(DataLoader(Stuck()))), daemon=True).start()
    return fetching.wait(60)


def names():
    """What a curious program finds on the classes and objects."""
    import inspect
    import pickle

    loader = DataLoader(TensorDataset(torch.ones(4)))
    utils = torch.utils.data._utils
    return {
        "signature": str(inspect.signature(DataLoader.__init__)),
        "loop": utils.worker._worker_loop.__qualname__,
        "pickled": pickle.loads(pickle.dumps(utils.worker._worker_loop)) is utils.worker._worker_loop,
        "loader": sorted(vars(loader)),
        "save": torch.save is torch.serialization.save,
        "meta_path": len(sys.meta_path) - sum("headrace" in type(f).__module__ for f in sys.meta_path),
        "sitecustomize": "sitecustomize" in sys.modules,
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"name": name, "saw": globals()[name]()}), flush=True)
