"""storage: every sample is a small file on a network mount that answers after a few milliseconds."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "storage",
    "steps": 110,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"num_workers": 8},
    "advice": ["num_workers"],
}


class NetworkFiles(Dataset):
    def __init__(self, num, latency_ms):
        self.num = num
        self.latency_ms = latency_ms

    def __len__(self):
        return self.num

    def read(self, index):
        time.sleep(self.latency_ms / 1000)  # open, read, close over the network
        return bytes([index % 251]) * 256

    def __getitem__(self, index):
        raw = self.read(index)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).float() / 255, index % 10


def make_loader(args):
    return DataLoader(
        NetworkFiles(args.steps_per_epoch * 8, args.latency_ms),
        batch_size=8,
        shuffle=True,
        num_workers=args.num_workers,
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
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=25, latency_ms=12.0)
