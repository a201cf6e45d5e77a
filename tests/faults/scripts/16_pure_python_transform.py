"""preprocess: a tokenizer in plain Python on every core, in an iterable dataset that each worker takes its share of."""

import itertools
import os
import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FAULT = {
    "cause": "preprocess",
    "steps": 130,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"tokenized": True},
    "advice": ["preprocess", "decode"],
}
TEXT = "the quick brown fox jumps over the lazy dog while seven wizards box five quacking zephyrs "


def tokenize(text):
    """A rolling hash per character pair: what hand-written tokenizers cost."""
    tokens, state = [], 0
    for left, right in itertools.pairwise(text):
        state = (state * 31 + ord(left) * 7 + ord(right)) % 1000
        tokens.append(state)
    return tokens


class Documents(IterableDataset):
    """``tokenized``: the documents were tokenized once, offline."""

    def __init__(self, num, tokenized):
        self.num = num
        self.texts = [TEXT[part:] + TEXT * 320 for part in range(8)]
        self.tokens = [tokenize(text) for text in self.texts] if tokenized else None

    def __len__(self):
        return self.num

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        # One worker makes whole batches of 8: documents are dealt out by eights.
        for block in range(first, self.num // 8, step):
            for index in range(block * 8, block * 8 + 8):
                tokens = self.tokens[index % 8] if self.tokens else tokenize(self.texts[index % 8])
                yield torch.tensor(tokens[:64]), index % 10


def make_loader(args):
    return DataLoader(
        Documents(args.steps_per_epoch * 8, args.tokenized),
        batch_size=8,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Sequential(nn.EmbeddingBag(1000, 16), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for tokens, labels in loader:
            loss = nn.functional.cross_entropy(model(tokens), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=len(os.sched_getaffinity(0)), device_ms=10, tokenized=False)
