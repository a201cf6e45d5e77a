"""transport: a recommender's batch is a nested dict of hundreds of feature columns, each a tensor of its own."""

import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "transport",
    "steps": 80,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"packed": True},
    "advice": ["transport", "pack"],
}
GROUPS, COLUMNS, BATCH = 12, 12, 64


class FeatureStore(Dataset):
    """Batches of rows come from a column store; ``packed``: all columns of a batch as one matrix."""

    def __init__(self, num, packed):
        self.num, self.packed = num, packed

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        matrix = torch.full((BATCH, GROUPS * COLUMNS), index / self.num)
        if self.packed:
            return {"features": matrix, "label": torch.arange(BATCH) % 10}
        groups = {
            f"group{group}": {
                f"column{column}": {"value": matrix[:, group * COLUMNS + column].clone(), "present": torch.ones(BATCH)}
                for column in range(COLUMNS)
            }
            for group in range(GROUPS)
        }
        return {"features": groups, "label": torch.arange(BATCH) % 10}


def make_loader(args):
    return DataLoader(
        FeatureStore(args.steps_per_epoch, args.packed),
        batch_size=None,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def first_columns(features):
    if isinstance(features, torch.Tensor):
        return features[:, :COLUMNS]
    return torch.stack([column["value"] for column in features["group0"].values()], dim=1)


def train(args, loader, meter):
    model = nn.Linear(COLUMNS, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for batch in loader:
            loss = nn.functional.cross_entropy(model(first_columns(batch["features"])), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=20, packed=False)
