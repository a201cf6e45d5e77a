"""workers: a CSV is parsed line by line in the trainer, in an iterable dataset, with num_workers=0."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FAULT = {
    "cause": "workers",
    "steps": 80,
    "start_methods": ["fork"],
    "fixed": {"num_workers": 2},
    "advice": ["num_workers"],
}
BATCH = 32


class Lines(IterableDataset):
    """Rows of 400 numbers as text; each worker parses every n-th block of rows, as the docs advise."""

    def __init__(self, num):
        self.num = num
        self.lines = [",".join(f"{(row * 37 + column) % 997 / 997:.6f}" for column in range(3200)) for row in range(64)]

    def __len__(self):
        return self.num

    def parse(self, line):
        values = [float(field) for field in line.split(",")]
        mean = sum(values) / len(values)
        return [(value - mean) * 2 for value in values]

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for block in range(first, self.num // BATCH, step):
            for index in range(block * BATCH, block * BATCH + BATCH):
                yield torch.tensor(self.parse(self.lines[index % 64])[:400]), index % 10


def make_loader(args):
    return DataLoader(
        Lines(args.steps_per_epoch * BATCH),
        batch_size=BATCH,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(400, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=0, device_ms=35)
