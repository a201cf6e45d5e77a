"""storage: all workers read through one file that is locked for each read, so they wait for each other."""

import fcntl
import os
import tempfile
import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "storage",
    "steps": 110,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"locked": False},
    "advice": ["lock", "storage"],
}


class LockedStore(Dataset):
    """A store that allows one reader at a time (an exclusive lock around each read of a few milliseconds)."""

    def __init__(self, num, path, locked):
        self.num, self.path, self.locked = num, path, locked

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        with open(self.path, "rb") as file:
            if self.locked:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(0.006)
            raw = bytearray(os.pread(file.fileno(), 128, index % 64 * 128))
        return torch.frombuffer(raw, dtype=torch.uint8).float() / 255, index % 10


def make_loader(args):
    return DataLoader(
        LockedStore(args.steps_per_epoch * 8, args.path, args.locked),
        batch_size=8,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(128, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for vectors, labels in loader:
            loss = nn.functional.cross_entropy(model(vectors), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as store:
        store.write(os.urandom(64 * 128))
        store.flush()
        truthlib.main(FAULT, make_loader, train, num_workers=3, device_ms=20, path=store.name, locked=True)
