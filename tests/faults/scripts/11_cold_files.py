"""storage: samples are small records scattered over a big file that is not in the page cache."""

import os
import tempfile
import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "storage",
    "steps": 150,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"cold": False},
    "advice": ["storage", "cache"],
}
RECORD_BYTES = 4096
RECORDS_PER_SAMPLE = 24


def write_archive(path, num_records):
    with open(path, "wb") as file:
        for _ in range(num_records // 256):
            file.write(os.urandom(256 * RECORD_BYTES))
        file.flush()
        os.fsync(file.fileno())


class Archive(Dataset):
    """Each sample gathers its records by seeking; ``cold`` gives its pages back first, so that the disk is asked."""

    def __init__(self, path, num_records, num, cold):
        self.path, self.num_records, self.num, self.cold = path, num_records, num, cold
        self.file = None

    def __len__(self):
        return self.num

    def open(self):
        self.file = os.open(self.path, os.O_RDONLY)
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)

    def record(self, number):
        return os.pread(self.file, RECORD_BYTES, number % self.num_records * RECORD_BYTES)

    def __getitem__(self, index):
        if self.file is None:
            self.open()
        if self.cold:
            # The whole file: a part of a large folio is never given back.
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)
        raw = bytearray(b"".join(self.record(index * 7919 + 104_729 * part) for part in range(RECORDS_PER_SAMPLE)))
        return torch.frombuffer(raw, dtype=torch.uint8)[:256].float() / 255, index % 10


def make_loader(args):
    return DataLoader(
        Archive(args.path, args.num_records, args.steps_per_epoch * 8, args.cold),
        batch_size=8,
        shuffle=True,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(256, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for vectors, labels in loader:
            loss = nn.functional.cross_entropy(model(vectors), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # /tmp may be memory
        archive = os.path.join(directory, "archive.bin")
        write_archive(archive, 32_768)
        truthlib.main(
            FAULT, make_loader, train, num_workers=2, device_ms=5, path=archive, num_records=32_768, cold=True
        )
