"""oversubscribed: the container may use 0.8 of a core (a real cgroup quota), and two workers decode JPEGs in it."""

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
    "cause": "oversubscribed",
    "steps": 34,
    "start_methods": ["fork", "spawn", "forkserver"],
    "cgroup": {"cpu_quota_cores": 0.8},
    "fixed": {"limited": False},
    "advice": ["cpu_quota", "quota"],
}


class Photos(Dataset):
    def __init__(self, num):
        self.files = photos.jpegs(8, 640, 480)
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.files[index % 8])).convert("RGB").resize((96, 96))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255, index % 10


def make_loader(args):
    return DataLoader(
        Photos(args.steps_per_epoch * 32),
        batch_size=32,
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
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=20, limited=True)
