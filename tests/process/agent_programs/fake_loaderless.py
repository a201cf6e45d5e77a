"""Five steps on batches of many makers, over the fake torch: ``fake_loaderless.py KIND``."""

import os
import sys

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake"))
import shuffling
from torch.optim import Optimizer


def get_batch(split="train"):
    return [1, 2]


def stream():
    while True:
        yield [1, 2]


class Feed:
    """Has a length, as DALI's iterators have: it must stay what it is."""

    def __iter__(self):
        return self

    def __next__(self):
        return [1, 2]

    def __len__(self):
        return 7


class Source:
    def __iter__(self):
        return stream()

    @staticmethod
    def read():
        return [1, 2]

    @classmethod
    def make(cls):
        assert cls is Source
        return [1, 2]


feed, other = Feed(), Feed()
source = Source()


def main():
    kind = sys.argv[1]
    optimizer = Optimizer()
    # Looked up at each call, as loops do.
    functions = {
        "get_batch": lambda: get_batch("train"),
        "read": lambda: Source.read(),
        "make": lambda: Source.make(),
        "shuffle": lambda: shuffling.shuffle(),
    }
    iterators = {"stream": stream, "Feed": Feed, "feed": lambda: feed, "source": lambda: iter(source)}
    iterator = iterators[kind]() if kind in iterators else None
    for _ in range(5):
        assert functions[kind]() if iterator is None else next(iterator)
        optimizer.step()
    if kind != "Feed":
        next(other)
    assert type(feed) is Feed
    assert len(feed) == 7
    print("ok")


if __name__ == "__main__":
    main()
