"""oversubscribed: eight workers on two cores, each with as many threads as the machine has cores.

No single worker has too many threads; together they spin for each other's cores. Half as many workers are faster.
"""

import os
import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "oversubscribed",
    "long_truth": True,
    "steps": 100,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"threads": 1},
    "advice": ["threads", "num_workers"],
}


class Features(Dataset):
    def __init__(self, num):
        self.num = num
        self.projection = torch.rand(256, 256, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        signal = torch.full((256, 256), index / self.num)
        for _ in range(2):
            signal = torch.tanh(signal @ self.projection)
        return signal.mean(0), index % 10


class SetThreads:
    def __init__(self, threads):
        self.threads = threads

    def __call__(self, worker_id):
        torch.set_num_threads(self.threads)


def make_loader(args):
    return DataLoader(
        Features(args.steps_per_epoch * 4),
        batch_size=4,
        num_workers=args.num_workers,
        worker_init_fn=SetThreads(args.threads),
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(256, 10)
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
    truthlib.main(FAULT, make_loader, train, num_workers=8, device_ms=10, threads=len(os.sched_getaffinity(0)))
