"""outside: a checkpoint every few steps, written to the node's memory disk before training goes on."""

import os
import tempfile
import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "outside",
    "steps": 80,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"every": 40},
    "advice": ["checkpoint"],
    "rate": "all",
    "needs_shm_bytes": 1_000_000_000,
}


class Vectors(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((64,), index / self.num), index % 10


def make_loader(args):
    return DataLoader(
        Vectors(args.steps_per_epoch * 32),
        batch_size=32,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def save(model, directory):
    with open(os.path.join(directory, "last.pt"), "wb") as file:
        torch.save(model.state_dict(), file)


def train(args, loader, meter):
    model = nn.ModuleDict({"head": nn.Linear(64, 10), "vocabulary": nn.Embedding(args.vocabulary, 256)})
    optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for _ in range(args.epochs):
            meter.epoch()
            for idx, (vectors, labels) in enumerate(loader):
                loss = nn.functional.cross_entropy(model["head"](vectors), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(args.device_ms / 1000)
                if idx % args.every == args.every - 1:
                    save(model, directory)
                meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=40, every=8, vocabulary=150_000)
