"""transport: ready-made float32 volumes of a hundred megabytes are copied from worker to trainer."""

import time

import numpy as np
import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "transport",
    "steps": 50,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"dtype": "uint8"},
    "advice": ["transport", "dtype"],
    "num_cached": 2,
    "needs_shm_bytes": 2_000_000_000,
}


class Volumes(Dataset):
    """Batches were cut offline; a fetch hands out one that is in memory already."""

    def __init__(self, num, dtype):
        self.num = num
        self.volumes = np.zeros((2, 32, 3, 64, 64, 64), dtype=dtype)
        self.volumes += np.arange(64, dtype=dtype)

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.from_numpy(self.volumes[index % 2]), torch.arange(32) % 10


def make_loader(args):
    return DataLoader(
        Volumes(args.steps_per_epoch, args.dtype),
        batch_size=None,
        shuffle=True,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(args.epochs):
        meter.epoch()
        for volumes, labels in loader:
            centres = volumes[:, 0, 32, 32].float()
            loss = nn.functional.cross_entropy(model(centres), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=1, device_ms=40, dtype="float32")
