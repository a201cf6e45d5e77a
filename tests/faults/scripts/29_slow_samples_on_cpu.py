"""straggler: one sample in a few hundred is a giant, half a second to decode; ready batches wait behind it."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "straggler",
    "steps": 140,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"slow_ms": 0},
    "advice": ["straggler", "slow_samples"],
}
SLOW_EVERY = 160  # samples; one batch in twenty


def decode_giant(cpu_ms):
    """Plain Python work for this much CPU time."""
    end_s, value = time.thread_time() + cpu_ms / 1000, 0
    while time.thread_time() < end_s:
        value = sum(byte * 31 for byte in range(2000))
    return value


class Samples(Dataset):
    def __init__(self, num, slow_ms):
        self.num, self.slow_ms = num, slow_ms

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        if index % SLOW_EVERY == 77 and self.slow_ms:
            decode_giant(self.slow_ms)
        return torch.full((256,), index / self.num), index % 10


def make_loader(args):
    return DataLoader(
        Samples(args.steps_per_epoch * 8, args.slow_ms),
        batch_size=8,
        num_workers=args.num_workers,
        prefetch_factor=args.prefetch_factor,
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
    truthlib.main(FAULT, make_loader, train, num_workers=2, prefetch_factor=2, device_ms=20, slow_ms=500)
