"""preprocess: spectrograms by numpy's FFT on every core, one worker each."""

import os
import time

import numpy as np
import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "preprocess",
    "steps": 180,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"precomputed": True},
    "advice": ["preprocess", "decode"],
}


def spectrogram(wave):
    frames = np.lib.stride_tricks.sliding_window_view(wave, 1024)[::64]
    power = np.abs(np.fft.rfft(frames * np.hanning(1024))) ** 2
    return np.log1p(power[:, :512].reshape(len(frames), 64, 8).mean(2)).mean(0).astype(np.float32)


class Recordings(Dataset):
    """``precomputed``: the spectrograms were computed once, offline."""

    def __init__(self, num, precomputed):
        self.num = num
        self.waves = np.random.default_rng(0).normal(size=(8, 32_000)).astype(np.float32)
        self.spectra = [spectrogram(wave) for wave in self.waves] if precomputed else None

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        spectrum = self.spectra[index % 8] if self.spectra else spectrogram(self.waves[index % 8])
        return torch.from_numpy(spectrum.copy()), index % 10


def make_loader(args):
    return DataLoader(
        Recordings(args.steps_per_epoch * 8, args.precomputed),
        batch_size=8,
        shuffle=True,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(64, 10)
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
    truthlib.main(FAULT, make_loader, train, num_workers=len(os.sched_getaffinity(0)), device_ms=8, precomputed=False)
