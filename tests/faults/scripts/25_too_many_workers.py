"""oversubscribed: sixteen workers on two cores, and each one opens (decompresses) every shard for itself.

Consecutive samples lie in one shard and a worker keeps only the last shard that it opened, so each worker more opens
each shard once more: the count itself costs rate. Half as many workers are faster.
"""

import time
import zlib

import numpy as np
import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "oversubscribed",
    "long_truth": True,
    "steps": 130,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"num_workers": 4},
    "advice": ["num_workers"],
}
SAMPLES_PER_SHARD = 128


class Shards(Dataset):
    def __init__(self, num):
        self.num = num
        noise = np.random.default_rng(0).integers(0, 16, (SAMPLES_PER_SHARD, 24_576), dtype=np.uint8)
        self.shards = [zlib.compress(np.roll(noise, part).tobytes(), 1) for part in range(4)]
        self.opened, self.samples = None, None

    def __len__(self):
        return self.num

    def open(self, shard):
        raw = zlib.decompress(self.shards[shard % 4])
        self.samples = np.frombuffer(raw, np.uint8).reshape(SAMPLES_PER_SHARD, -1)
        self.opened = shard

    def __getitem__(self, index):
        shard, place = divmod(index, SAMPLES_PER_SHARD)
        if shard != self.opened:
            self.open(shard)
        return torch.from_numpy(self.samples[place, :256].astype(np.float32)), index % 10


def make_loader(args):
    return DataLoader(
        Shards(args.steps_per_epoch * 8),
        batch_size=8,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(256, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
    truthlib.main(FAULT, make_loader, train, num_workers=16, device_ms=5)
