"""No DataLoader: trains for so many seconds on what get_batch makes. ``loaderless.py SECONDS``."""

import sys
import time

import torch

DATA = torch.arange(100, dtype=torch.float32)


def get_batch():
    time.sleep(0.004)  # the slow store
    return DATA[:4]


def main():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    begin = time.perf_counter()
    while time.perf_counter() - begin < float(sys.argv[1]):
        (get_batch() * weight).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
