"""rank, by way of storage: rank 1 reads from a slow disk and stalls; rank 0 has its data and waits for rank 1.

What to cure is rank 1's storage; "rank" is what rank 0 sees. Either is a right answer at the top.
"""

import os
import time

import torch
import truthlib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "storage",
    "also": ["rank"],
    "steps": 90,
    "ranks": 2,
    "truth_rank": 1,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"slow_ms": 0},
    "advice": ["storage"],
}


class Files(Dataset):
    def __init__(self, num, read_ms):
        self.num, self.read_ms = num, read_ms

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        if self.read_ms:
            time.sleep(self.read_ms / 1000)  # the slow disk
        return torch.full((64,), index / self.num), index % 10


def make_loader(args):
    rank = int(os.environ["RANK"])
    return DataLoader(
        Files(args.steps_per_epoch * 8, args.slow_ms * rank),
        batch_size=8,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = DistributedDataParallel(nn.Linear(64, 10))
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
    truthlib.main(FAULT, make_loader, train, num_workers=1, device_ms=25, slow_ms=8)
