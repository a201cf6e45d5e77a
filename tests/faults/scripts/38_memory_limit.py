"""memory: the container's memory limit leaves no room for the page cache, so a mapped array is read again and again."""

import os
import tempfile
import time

import numpy as np
import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "memory",
    "steps": 100,
    "start_methods": ["fork"],
    "cgroup": {"memory_bytes": 520_000_000},
    "fixed": {"limited": False},
    "advice": ["memory", "memory_limit"],
}
ROWS, ROW_BYTES = 640, 1 << 20


def write_rows(path):
    with open(path, "wb") as file:
        for row in range(ROWS):
            file.write(bytes([row % 251]) * ROW_BYTES)
        file.flush()
        os.fsync(file.fileno())


class MappedRows(Dataset):
    def __init__(self, num, path):
        self.num, self.path = num, path
        self.rows = None

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        if self.rows is None:
            self.rows = np.memmap(self.path, np.uint8, "r", shape=(ROWS, ROW_BYTES))
        row = self.rows[index * 389 % ROWS]
        return torch.from_numpy(row[:: ROW_BYTES // 256].astype(np.float32)), index % 10


def make_loader(args):
    return DataLoader(
        MappedRows(args.steps_per_epoch * 16, args.path),
        batch_size=16,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(256, 10)
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
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # /tmp may be memory
        path = os.path.join(directory, "rows.bin")
        write_rows(path)
        truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=10, path=path, limited=True)
