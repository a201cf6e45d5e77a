"""transport: a batch of graphs stays a list of hundreds of small tensors, and each is sent by itself."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "transport",
    "steps": 80,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"packed": True},
    "advice": ["transport", "pack"],
}


class Graphs(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((16, 4), index / self.num), torch.arange(32).reshape(2, 16) % 16, index % 10


def keep_lists(samples):
    nodes, edges, labels = zip(*samples, strict=True)
    return list(nodes), list(edges), torch.tensor(labels)


def pack(samples):
    nodes, edges, labels = zip(*samples, strict=True)
    return torch.stack(nodes), torch.stack(edges), torch.tensor(labels)


def make_loader(args):
    return DataLoader(
        Graphs(args.steps_per_epoch * 128),
        batch_size=128,
        num_workers=args.num_workers,
        collate_fn=pack if args.packed else keep_lists,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(4, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for nodes, _edges, labels in loader:
            pooled = torch.stack([graph[0] for graph in nodes[:32]])
            loss = nn.functional.cross_entropy(model(pooled), labels[:32])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=20, packed=False)
