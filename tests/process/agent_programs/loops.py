"""Loops of many shapes, each on lines of its own; numbers are known. Prints nothing."""

import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
from endless import InfiniteDataLoader  # an installed package, as far as headrace can tell


class Numbers(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((2,), float(index))


MODEL = torch.nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.001)


def train(batch, step=True):
    MODEL(batch).sum().backward()
    if step:
        OPTIMIZER.step()
        OPTIMIZER.zero_grad()


@torch.no_grad()
def validate(loader):
    for batch in loader:
        MODEL(batch)


def endless():
    loader = InfiniteDataLoader(Numbers(12), batch_size=4, num_workers=2)  # site: endless
    for _ in range(3):
        for batch in loader:
            train(batch)


def anew_each_epoch():
    for _ in range(3):
        for batch in DataLoader(Numbers(8), batch_size=4, num_workers=2):  # site: anew
            train(batch)


def accumulate():
    for i, batch in enumerate(DataLoader(Numbers(16), batch_size=2)):  # site: accumulate
        train(batch, step=i % 4 == 3)


def validation_between():
    training = DataLoader(Numbers(12), batch_size=2)  # site: between, training
    validation = DataLoader(Numbers(6), batch_size=2, num_workers=2)  # site: between, validation
    for _ in range(2):
        for batch in training:
            train(batch)
        validate(validation)


def validation_inside():
    training = DataLoader(Numbers(12), batch_size=2)  # site: inside, training
    validation = DataLoader(Numbers(6), batch_size=2)  # site: inside, validation
    for i, batch in enumerate(training):
        train(batch)
        if i % 3 == 2:
            validate(validation)


def adversaries():
    real = DataLoader(Numbers(12), batch_size=2, num_workers=1)  # site: zip, one
    noise = DataLoader(Numbers(12), batch_size=2, num_workers=1)  # site: zip, two
    for one, two in zip(real, noise, strict=False):
        train(one + two)


if __name__ == "__main__":
    endless()
    anew_each_epoch()
    accumulate()
    validation_between()
    validation_inside()
    adversaries()
