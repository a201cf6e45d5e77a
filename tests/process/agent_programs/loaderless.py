"""No DataLoader: ``loaderless.py KIND SECONDS``. Batches come from what the function KIND of this script makes."""

import sys
import time

import torch

DATA = torch.arange(100, dtype=torch.float32)


def get_batch(split="train"):
    time.sleep(0.004)  # the slow store
    return DATA[:4]


def stream():
    while True:
        yield get_batch()


class Feed:
    def __init__(self):
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        return get_batch()

    def __len__(self):
        return 7


class Source:
    def __iter__(self):
        return stream()

    @staticmethod
    def read():
        return get_batch()

    @classmethod
    def make(cls):
        assert cls is Source
        return get_batch()


feed = Feed()
source = Source()


def main():
    kind, seconds = sys.argv[1], float(sys.argv[2])
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    if kind in ("get_batch", "read", "make"):
        following = lambda: globals()[kind]() if kind == "get_batch" else getattr(Source, kind)()  # noqa: E731
    else:
        made = {"stream": stream, "Feed": Feed, "feed": lambda: feed, "source": lambda: iter(source)}[kind]()
        following = lambda: next(made)  # noqa: E731
    begin, num = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds or num < 5:
        (following() * weight).sum().backward()
        optimizer.step()
        num += 1
    assert type(feed) is Feed
    assert len(feed) == 7
    print("ok", num)


if __name__ == "__main__":
    main()
