"""storage: num_workers=0 and a slow object store; the trainer itself sits blocked in each read."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "storage",
    "steps": 80,
    "start_methods": ["fork"],
    "fixed": {"num_workers": 4},
    "advice": ["num_workers"],
}


class Objects(Dataset):
    def __init__(self, num, latency_ms):
        self.num = num
        self.latency_ms = latency_ms

    def __len__(self):
        return self.num

    def get_object(self, key):
        time.sleep(self.latency_ms / 1000)  # the bucket's round trip
        return key.encode() * 32

    def __getitem__(self, index):
        raw = bytearray(self.get_object(f"{index % 97:04d}"))
        return torch.frombuffer(raw, dtype=torch.uint8).float() / 255, index % 10


def make_loader(args):
    return DataLoader(
        Objects(args.steps_per_epoch * 8, args.latency_ms),
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
    truthlib.main(FAULT, make_loader, train, num_workers=0, device_ms=30, latency_ms=6.0)
