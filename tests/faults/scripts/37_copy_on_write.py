"""memory: samples are bytes objects in one huge list; touching them changes their reference counts, so that every
worker gets its own copy of each page it reads, and most of its time is page faults."""

import time

import numpy as np
import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "memory",
    "steps": 160,
    "epochs": 8,
    "start_methods": ["fork"],
    "fixed": {"packed": True},
    "advice": ["memory", "dataset", "copy_on_write"],
}
RECORDS, RECORD_BYTES, PER_SAMPLE = 150_000, 3500, 4000


class Windows(Dataset):
    """A sample sums up thousands of records; ``packed``: all records in one numpy array, which nobody counts."""

    def __init__(self, num, packed):
        self.num, self.packed = num, packed
        if packed:
            self.array = np.ones((RECORDS, RECORD_BYTES), np.uint8)
        else:
            self.records = [bytes(RECORD_BYTES - 33) for _ in range(RECORDS)]

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        first = index * PER_SAMPLE % (RECORDS - PER_SAMPLE)
        if self.packed:
            total = int(self.array[first : first + PER_SAMPLE, 0].sum())
        else:
            total = sum(len(record) for record in self.records[first : first + PER_SAMPLE])
        return torch.full((64,), float(total % 100)), index % 10


def make_loader(args):
    return DataLoader(
        Windows(args.steps_per_epoch * 4, args.packed),
        batch_size=4,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
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
    truthlib.main(FAULT, make_loader, train, num_workers=1, device_ms=10, packed=False)
