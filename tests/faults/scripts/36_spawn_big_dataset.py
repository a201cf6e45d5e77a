"""epoch: under spawn and forkserver the whole dataset is pickled and sent to every worker, in every epoch."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "epoch",
    "steps": 60,
    "epochs": 3,
    "start_methods": ["spawn", "forkserver"],
    "fixed": {"persistent_workers": True},
    "advice": ["persistent_workers"],
    "rate": "all",
    "truth_repeats": 1,
}


class Records(Dataset):
    """A list of small records, as read from a JSON file."""

    def __init__(self, num):
        self.num = num
        self.records = [{"id": number, "label": number % 10, "tags": [number % 7]} for number in range(200_000)]

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        record = self.records[index % len(self.records)]
        return torch.full((64,), record["id"] / len(self.records)), record["label"]


def make_loader(args):
    return DataLoader(
        Records(args.steps_per_epoch * 16),
        batch_size=16,
        shuffle=True,
        num_workers=args.num_workers,
        persistent_workers=args.persistent_workers,
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
