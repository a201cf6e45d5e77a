"""preprocess: eight workers on two cores queue for them, yet fewer would be no faster: the cores limit."""

import io
import time

import numpy as np
import photos
import torch
import truthlib
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "preprocess",
    "long_truth": True,
    "steps": 130,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"decoded": True},
    "advice": ["preprocess", "decode"],
}


class Photos(Dataset):
    """``decoded``: the photographs were decoded and shrunk once, offline."""

    def __init__(self, num, decoded):
        self.num, self.decoded = num, decoded
        self.files = photos.jpegs(8, 640, 480)
        self.arrays = [self.decode(file) for file in self.files] if decoded else None

    def __len__(self):
        return self.num

    def decode(self, file):
        return np.array(Image.open(io.BytesIO(file)).convert("RGB").resize((96, 96)))

    def __getitem__(self, index):
        pixels = self.arrays[index % 8] if self.decoded else self.decode(self.files[index % 8])
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, index % 10


def make_loader(args):
    return DataLoader(
        Photos(args.steps_per_epoch * 8, args.decoded),
        batch_size=8,
        shuffle=True,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(432, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=8, device_ms=8, decoded=False)
