"""compute: gradient accumulation, an optimizer step every fourth batch; the device sets the pace."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {"cause": "compute", "steps": 200, "start_methods": ["fork", "spawn", "forkserver"]}


class Tokens(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randint(100, (33,), generator=draw)


def make_loader(args):
    return DataLoader(
        Tokens(args.steps_per_epoch * 8),
        batch_size=8,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(args.epochs):
        meter.epoch()
        for idx, tokens in enumerate(loader):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 4
            loss.backward()
            time.sleep(args.device_ms / 1000)
            if idx % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=1, device_ms=25)
