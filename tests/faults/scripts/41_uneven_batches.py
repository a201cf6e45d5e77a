"""rank: sequences are dealt out unevenly, so that rank 1 computes longer; gradients are averaged by hand (torchrun)."""

import os
import time

import torch
import torch.distributed as dist
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "rank",
    "steps": 85,
    "ranks": 2,
    "launcher": "torchrun",
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"uneven": False},
    "advice": ["rank"],
}


class Sequences(Dataset):
    """Sorted by length and cut in two halves: the long ones are rank 1's. ``uneven=False`` deals them out in turn."""

    def __init__(self, num, rank, uneven):
        self.num, self.rank, self.uneven = num, rank, uneven

    def __len__(self):
        return self.num

    def length(self, index):
        return (10 if self.rank == 0 else 50) if self.uneven else (10, 50)[index // 8 % 2]

    def __getitem__(self, index):
        return torch.ones(64) * (index % 7), index % 10, self.length(index)


def make_loader(args):
    dataset = Sequences(args.steps_per_epoch * 8, int(os.environ["RANK"]), args.uneven)
    return DataLoader(
        dataset, batch_size=8, num_workers=args.num_workers, multiprocessing_context=truthlib.context(args)
    )


def train(args, loader, meter):
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(args.epochs):
        meter.epoch()
        for vectors, labels, lengths in loader:
            loss = nn.functional.cross_entropy(model(vectors), labels)
            optimizer.zero_grad()
            loss.backward()
            time.sleep(args.device_ms_per_token * float(lengths.float().mean()) / 1000)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=1, device_ms_per_token=1.4, uneven=True)
