"""compute: the network itself runs on the CPU; its data lies ready in memory."""

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = {"cause": "compute", "steps": 250, "start_methods": ["fork"]}


def make_loader(args):
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(args.steps_per_epoch * 96, 256, generator=draw)
    labels = torch.randint(10, (len(images),), generator=draw)
    return DataLoader(TensorDataset(images, labels), batch_size=96, shuffle=True)


def train(args, loader, meter):
    model = nn.Sequential(
        nn.Linear(256, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(args.epochs):
        meter.epoch()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, width=1024)
