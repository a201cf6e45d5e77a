"""epoch: epochs of a few steps, and the workers are started and open their dataset anew in each."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "epoch",
    "steps": 90,
    "epochs": 9,
    "start_methods": ["fork"],
    "fixed": {"persistent_workers": True},
    "advice": ["persistent_workers"],
    "rate": "all",
}


class Index(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((64,), index / self.num), index % 10


def open_index(worker_id):
    time.sleep(0.3)  # an index is fetched from the object store


def make_loader(args):
    return DataLoader(
        Index(args.steps_per_epoch * 16),
        batch_size=16,
        shuffle=True,
        num_workers=args.num_workers,
        persistent_workers=args.persistent_workers,
        worker_init_fn=open_index,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(64, 10)
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
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=30, persistent_workers=False)
