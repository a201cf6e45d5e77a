"""rank: DistributedDataParallel on two ranks; rank 1's device is slower, and rank 0 waits for it in every backward."""

import os
import time

import torch
import truthlib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = {
    "cause": "rank",
    "steps": 85,
    "ranks": 2,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"late_ms": 0},
    "advice": ["rank"],
}


class Vectors(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((64,), index / self.num), index % 10


def make_loader(args):
    dataset = Vectors(args.steps_per_epoch * 32)
    return DataLoader(
        dataset,
        batch_size=16,
        sampler=DistributedSampler(dataset),
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    rank = int(os.environ["RANK"])
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for vectors, labels in loader:
            loss = nn.functional.cross_entropy(model(vectors), labels)
            time.sleep((args.device_ms + rank * args.late_ms) / 1000)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=1, device_ms=25, late_ms=40)
