"""compute: a slow accelerator (a fixed step that uses no CPU) behind a loader that is far ahead of it."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {"cause": "compute", "steps": 100, "start_methods": ["fork", "spawn", "forkserver"]}


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
        shuffle=True,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(64, 10)
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
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=60)
