"""compute: num_workers=0 is right where a batch costs nothing; a small-tensor task as beginners write it."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = {"cause": "compute", "steps": 240, "start_methods": ["fork"]}


def make_loader(args):
    inputs = torch.linspace(-1, 1, args.steps_per_epoch * 8).unsqueeze(1)
    return DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=8, shuffle=True)


def train(args, loader, meter):
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(args.epochs):
        meter.epoch()
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, device_ms=24)
