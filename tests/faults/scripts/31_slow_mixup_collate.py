"""collate: mixing pairs of samples inside the collate function, one numpy loop per pair; the dataset itself is fast."""

import time

import numpy as np
import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

FAULT = {
    "cause": "collate",
    "steps": 90,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"vectorised": True},
    "advice": ["collate"],
}


class Spectra(Dataset):
    def __init__(self, num):
        self.num = num
        self.spectra = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return self.spectra[index % 64], index % 10


def mix_by_hand(samples):
    """Each row becomes the mean of its eight nearest rows in the batch, found one distance at a time."""
    mixed = []
    for spectrum, label in samples:
        distances = [float(np.abs(spectrum - other).sum()) for other, _ in samples]
        nearest = sorted(range(len(samples)), key=distances.__getitem__)[:8]
        mixed.append((np.mean([samples[place][0] for place in nearest], axis=0), label))
    return default_collate(mixed)


def mix_vectorised(samples):
    rows = torch.from_numpy(np.stack([spectrum for spectrum, _ in samples]))
    labels = torch.tensor([label for _, label in samples])
    nearest = torch.cdist(rows, rows, p=2).topk(8, largest=False).indices
    return rows[nearest].mean(1), labels


def make_loader(args):
    return DataLoader(
        Spectra(args.steps_per_epoch * 128),
        batch_size=128,
        num_workers=args.num_workers,
        collate_fn=mix_vectorised if args.vectorised else mix_by_hand,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(512, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for spectra, labels in loader:
            loss = nn.functional.cross_entropy(model(spectra), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=1, device_ms=15, vectorised=False)
