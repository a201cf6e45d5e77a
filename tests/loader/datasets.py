"""Small datasets of the loader's tests; importable, so that spawned workers can unpickle them."""

import faulthandler
import os
import random
import signal
import time

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Numbers:
    """Sample i is a tensor full of i, and i."""

    def __init__(self, size, width=8):
        self.size, self.width = size, width

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((self.width,), float(index)), index


class Drawing(Numbers):
    """Draws from all three global generators."""

    def __getitem__(self, index):
        return index, torch.rand(3), np.random.rand(), random.random()


class Who(Numbers):
    """Says which worker made it, and in which process."""

    def __getitem__(self, index):
        info = get_worker_info()
        return index, info.id, info.num_workers, os.getpid()


class Dying(Numbers):
    """Index ``at`` ends its worker, as long as the file ``mark`` does not exist, which the first death makes."""

    def __init__(self, size, at, how, mark=None):
        super().__init__(size)
        self.at, self.how, self.mark = at, how, mark

    def __getitem__(self, index):
        if index == self.at and not (self.mark and os.path.exists(self.mark)):
            if self.mark:
                open(self.mark, "x").close()
            if self.how == "exit":
                os._exit(7)
            faulthandler.disable()  # its long story is not what is tested
            os.kill(os.getpid(), getattr(signal, self.how))
        return (*Drawing.__getitem__(self, index), torch.full((20_000,), float(index)))


class Stuck(Numbers):
    """Index ``at`` waits for a very long time."""

    def __init__(self, size, at):
        super().__init__(size)
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            time.sleep(3600)
        return index


class Slow(Numbers):
    """Some samples take a time; all draw."""

    def __init__(self, size, seconds):
        super().__init__(size)
        self.seconds = seconds

    def __getitem__(self, index):
        time.sleep(self.seconds.get(index, 0))
        return index, torch.rand(()), torch.full((20_000,), float(index))


class Stream(IterableDataset):
    """Each worker gives as many numbers as ``sizes`` says, from 100 times its number on."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        info = get_worker_info()
        number = info.id if info else 0
        return iter([100 * number + k for k in range(self.sizes[number])])


class Failing(Numbers):
    """Index ``at`` raises ``error``."""

    def __init__(self, size, at, error):
        super().__init__(size)
        self.at, self.error = at, error

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return index


def square(items):
    """A collate_fn."""
    return torch.tensor([item * item for item in items])


def fail_to_start(number):
    """A worker_init_fn."""
    if number == 1:
        raise AttributeError("dataset has no attribute 'start'")


def die_at_start(number):
    """A worker_init_fn."""
    os._exit(3)
