"""collate: token lists are padded element by element in a plain Python collate function."""

import time

import torch
import truthlib
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "collate",
    "steps": 130,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"vectorised": True},
    "advice": ["collate"],
}


class Sentences(Dataset):
    def __init__(self, num):
        self.num = num
        self.sentences = [[(word * 17 + row) % 500 for word in range(200 + row * 4)] for row in range(64)]
        self.tensors = [torch.tensor(sentence) for sentence in self.sentences]

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return self.tensors[index % 64], index % 10


def pad_by_hand(samples):
    longest = max(len(tokens) for tokens, _ in samples)
    rows, mask = [], []
    for tokens, _ in samples:
        words = tokens.tolist()
        rows.append([words[place] if place < len(words) else 0 for place in range(longest)])
        mask.append([1.0 if place < len(words) and words[place] != 0 else 0.0 for place in range(longest)])
    return torch.tensor(rows), torch.tensor(mask), torch.tensor([label for _, label in samples])


def pad_vectorised(samples):
    tokens = pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return tokens, (tokens != 0).float(), torch.tensor([label for _, label in samples])


def make_loader(args):
    return DataLoader(
        Sentences(args.steps_per_epoch * 384),
        batch_size=384,
        num_workers=args.num_workers,
        collate_fn=pad_vectorised if args.vectorised else pad_by_hand,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.ModuleList([nn.Embedding(500, 4), nn.Linear(4, 10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for tokens, _mask, labels in loader:
            loss = nn.functional.cross_entropy(model[1](model[0](tokens[:, :4]).mean(1)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=1, device_ms=20, vectorised=False)
