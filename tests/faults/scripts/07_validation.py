"""outside: a long evaluation after every short epoch; the training steps themselves never wait for data."""

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
    "fixed": {"evaluate_every": 100},
    "advice": ["validation", "evaluation"],
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
        shuffle=True,
        num_workers=args.num_workers,
        persistent_workers=True,
        multiprocessing_context=truthlib.context(args),
    )


@torch.no_grad()
def evaluate(args, model):
    held_out = DataLoader(Vectors(args.held_out * 32), batch_size=32)
    right = 0
    for vectors, labels in held_out:
        right += int((model(vectors).argmax(1) == labels).sum())
        time.sleep(args.device_ms / 1000)
    return right / (args.held_out * 32)


def train(args, loader, meter):
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        model.train()
        meter.epoch()
        for vectors, labels in loader:
            loss = nn.functional.cross_entropy(model(vectors), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()
        if epoch % args.evaluate_every == 0:
            model.eval()
            evaluate(args, model)


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=30, held_out=20, evaluate_every=1)
