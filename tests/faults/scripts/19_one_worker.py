"""workers: one worker computes features and cannot keep up; a second core idles."""

import time

import numpy as np
import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "workers",
    "steps": 80,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"num_workers": 2},
    "advice": ["num_workers"],
}


class Signals(Dataset):
    def __init__(self, num):
        self.num = num
        self.waves = np.random.default_rng(0).normal(size=(8, 16_384))

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        wave = self.waves[index % 8]
        features = [np.abs(np.fft.rfft(np.roll(wave, shift)))[:64].mean() for shift in range(28)]
        return torch.tensor(features, dtype=torch.float32), index % 10


def make_loader(args):
    return DataLoader(
        Signals(args.steps_per_epoch * 16),
        batch_size=16,
        shuffle=True,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(28, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(args.epochs):
        meter.epoch()
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=1, device_ms=50)
