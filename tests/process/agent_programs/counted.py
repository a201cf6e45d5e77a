"""Two epochs of five batches of four in each place: ``counted.py WORKERS:METHOD...``."""

import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((6,), float(index))


def main(workers, method):
    loader = DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=workers,
        multiprocessing_context=method if workers else None,
        persistent_workers=workers > 0,
    )
    weight = torch.nn.Parameter(torch.ones(6))
    optimizer = torch.optim.SGD([weight], lr=0.001)
    for _ in range(2):
        for batch in loader:
            (batch * weight).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    for place in sys.argv[1:]:
        main(int(place.split(":")[0]), place.split(":")[1])
