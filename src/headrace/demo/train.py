"""Trains a classifier on a folder of JPEG photographs, one folder per class: a plain script, as beginners write it.

It knows nothing of headrace but the simulated device, which stands in where no GPU is found.
"""

import argparse
import contextlib
import time
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms


class Photographs(Dataset):
    def __init__(self, root, transform):
        self.files = sorted(Path(root).glob("*/*.jpg"))
        self.classes = sorted({f.parent.name for f in self.files})
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        file = self.files[i]
        image = Image.open(file).convert("RGB")
        return self.transform(image), self.classes.index(file.parent.name)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--max-seconds", type=float, default=float("inf"), help="stop after this long on a slow machine"
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--prefetch", type=int, default=None)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--threads", type=int, default=None, help="threads that torch uses inside one operation")
    parser.add_argument("--step-ms", type=float, default=0.0, help="length of a simulated device's step")
    parser.add_argument("--simulate", action="store_true", help="do not use the GPU even when there is one")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    dataset = Photographs(args.data, transform)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        prefetch_factor=args.prefetch,
        persistent_workers=args.persistent,
        pin_memory=args.pin,
    )
    if torch.cuda.is_available() and not args.simulate:
        device, device_step = torch.device("cuda"), contextlib.nullcontext
        model = models.resnet18(num_classes=len(dataset.classes)).to(device)
        print("device:", torch.cuda.get_device_name(), flush=True)
    else:
        from headrace.testing import SimulatedDevice

        # The fixed step stands for a real model's; only a toy one is really computed, so that the cores stay free.
        device, device_step = torch.device("cpu"), SimulatedDevice(args.step_ms).step
        model = nn.Sequential(nn.AvgPool2d(56), nn.Flatten(), nn.Linear(3 * 4 * 4, len(dataset.classes)))
        print(f"device: SIMULATED, {args.step_ms:g} ms a step", flush=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()

    step, start, done = 0, time.perf_counter(), False
    while not done:
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            with device_step():
                loss = loss_fn(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step}/{args.steps} loss {loss.item():.3f}", flush=True)
            done = step == args.steps or time.perf_counter() - start > args.max_seconds
            if done:
                break
    seconds = time.perf_counter() - start
    print(f"trained {step} steps in {seconds:.3f} s ({step * args.batch_size / seconds:.1f} images/s)", flush=True)


if __name__ == "__main__":
    main()
