"""outside: after every epoch the metrics are uploaded to a slow tracking server before the next epoch begins."""

import json
import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "outside",
    "steps": 100,
    "epochs": 5,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"upload_ms": 0},
    "advice": ["logging", "outside"],
    "rate": "all",
}


class Vectors(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((64,), index / self.num), index % 10


def make_loader(args):
    return DataLoader(
        Vectors(args.steps_per_epoch * 32),
        batch_size=32,
        num_workers=args.num_workers,
        persistent_workers=True,
        multiprocessing_context=truthlib.context(args),
    )


def upload(metrics, upload_ms):
    json.dumps(metrics)
    time.sleep(upload_ms / 1000)  # the server's answer


def train(args, loader, meter):
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        losses = []
        meter.epoch()
        for vectors, labels in loader:
            loss = nn.functional.cross_entropy(model(vectors), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            time.sleep(args.device_ms / 1000)
            meter.step()
        upload({"epoch": epoch, "losses": losses}, args.upload_ms)


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=30, upload_ms=600)
