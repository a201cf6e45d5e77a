"""oversubscribed: numpy's BLAS starts a thread per core in each worker, and they spin."""

import os
import time

import numpy as np
import threadpoolctl
import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "oversubscribed",
    "steps": 90,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"threads": 1},
    "advice": ["threads"],
}


class Covariances(Dataset):
    def __init__(self, num, threads):
        self.num, self.threads = num, threads
        self.readings = np.random.default_rng(0).normal(size=(8, 320, 320)).astype(np.float32)

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        readings = self.readings[index % 8]
        for _ in range(2):
            readings = readings @ self.readings[0] / 14
        return torch.from_numpy(readings.mean(0).copy()), index % 10


class LimitThreads:
    """OpenBLAS's own default is a thread per core, in every worker."""

    def __init__(self, threads):
        self.threads = threads

    def __call__(self, worker_id):
        threadpoolctl.threadpool_limits(self.threads, user_api="blas")


def make_loader(args):
    return DataLoader(
        Covariances(args.steps_per_epoch * 8, args.threads),
        batch_size=8,
        shuffle=True,
        num_workers=args.num_workers,
        worker_init_fn=LimitThreads(args.threads),
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(320, 10)
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
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=10, threads=len(os.sched_getaffinity(0)))
