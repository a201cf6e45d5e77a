"""Trains until it is told to end: says ``ready PID WORKER...`` after two batches, goes on until its stdin closes."""

import os
import sys
import threading

import torch
from torch.utils.data import DataLoader, IterableDataset


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(2)


def main():
    told = threading.Event()
    # Not sys.stdin: its lock would be held for ever in the forked workers.
    threading.Thread(target=lambda: (os.read(0, 1), told.set()), daemon=True).start()
    iterator = iter(DataLoader(Endless(), batch_size=2, num_workers=int(sys.argv[1])))
    count = 0
    while not told.is_set():
        next(iterator)
        count += 1
        if count == 4:
            print("ready", os.getpid(), *[w.pid for w in getattr(iterator, "_workers", ())], flush=True)
    print("done", flush=True)
    os._exit(6)  # the workers are daemons: no need to wait for them


if __name__ == "__main__":
    main()
