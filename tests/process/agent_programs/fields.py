"""Loops whose events are known field by field; see ``TestFields``."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Sleepy(Dataset):
    """Each sample takes 5 ms; the first one 100 ms when it is ``slow_first``."""

    def __init__(self, num, slow_first=False):
        self.num, self.slow_first = num, slow_first

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        time.sleep(0.1 if self.slow_first and index == 0 else 0.005)
        return torch.ones(2)


def main():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.001)
    for batch in DataLoader(Sleepy(10), num_workers=1):  # site: waits
        for _ in range(3):
            (batch * weight).sum().backward()
        optimizer.step()
    for batch in DataLoader([torch.ones(2)] * 40):  # site: ready
        (batch * weight).sum().backward()
        optimizer.step()
    for _ in DataLoader(Sleepy(8, slow_first=True), num_workers=2, in_order=False):  # site: any order
        pass
    (weight * 2).sum().backward()


if __name__ == "__main__":
    main()
    import _headrace_agent

    _headrace_agent.stop()
