"""Iterates loaders of many kinds and prints, for each, a hash of every byte of every batch, the losses and the types.

Arguments: ``method:workers`` and, after a slash, the scenario names (all without one).
"""

import collections
import hashlib
import json
import multiprocessing
import random
import sys
import traceback
import warnings

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

Point = collections.namedtuple("Point", "x y")


class Augmented(Dataset):
    """Twenty samples with random draws from torch and from Python."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((3,), float(index)) + torch.rand(3) * 0.1 + random.random() * 0.1


class Fixed(Augmented):
    """The same from whichever worker."""

    def __getitem__(self, index):
        return torch.full((3,), float(index))


class Dicts(Augmented):
    def __getitem__(self, index):
        return {"x": super().__getitem__(index), "name": f"n{index}", "id": index}


class Points(Augmented):
    def __getitem__(self, index):
        return Point(super().__getitem__(index), index)


class Whole(Augmented):
    """Fetches a batch at once, and wants its list of indices to be a plain list."""

    def __getitems__(self, indices):
        assert type(indices) is list
        return [self[index] for index in indices]


class Faulty(Augmented):
    def __getitem__(self, index):
        if index == 9:
            raise KeyError("no sample nine")
        return super().__getitem__(index)


class Stream(IterableDataset):
    """Says when it is closed: nothing of headrace's may keep it alive for longer."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        try:
            for index in range(info.id if info else 0, 21, info.num_workers if info else 1):
                yield torch.full((3,), float(index)) + torch.rand(3)
        finally:
            print(f"closed {info and info.id}", flush=True)


class Liar(Stream):
    """torch warns when more comes than len() said, but only if somebody asked for len()."""

    def __len__(self):
        return 2


def digest(item, into):
    into.update(type(item).__name__.encode())
    if isinstance(item, torch.Tensor):
        into.update(str((item.dtype, item.shape)).encode() + item.numpy().tobytes())
    elif isinstance(item, dict):
        for key, value in item.items():
            into.update(key.encode())
            digest(value, into)
    elif isinstance(item, (list, tuple)):
        for value in item:
            digest(value, into)
    else:
        into.update(repr(item).encode())


def features(batch):
    if isinstance(batch, dict):
        return batch["x"]
    return batch.x if isinstance(batch, Point) else batch


class Trainer:
    def __init__(self):
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.hashes, self.losses = [], []

    def step(self, batch):
        into = hashlib.sha256()
        digest(batch, into)
        self.hashes.append(into.hexdigest()[:16])
        loss = self.model(features(batch).reshape(-1, 3)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())


SCENARIOS = {
    "map": lambda: (Augmented(), {"batch_size": 4, "shuffle": True}),
    "persistent": lambda: (Augmented(), {"batch_size": 4, "shuffle": True, "persistent_workers": True}),
    "iterable": lambda: (Stream(), {"batch_size": 4}),
    "liar": lambda: (Liar(), {"batch_size": 4}),
    "batch_sampler": lambda: (Augmented(), {"batch_sampler": BatchSampler(RandomSampler(range(20)), 3, True)}),
    "no_batches": lambda: (Augmented(), {"batch_size": None}),
    "dicts": lambda: (Dicts(), {"batch_size": 4}),
    "points": lambda: (Points(), {"batch_size": 4}),
    "getitems": lambda: (Whole(), {"batch_size": 4}),
    "error": lambda: (Faulty(), {"batch_size": 4}),
    "broken_off": lambda: (Augmented(), {"batch_size": 4, "shuffle": True}),
    "any_order": lambda: (Fixed(), {"batch_size": 4, "in_order": False}),
    "pinned": lambda: (Augmented(), {"batch_size": 4, "pin_memory": True}),
}
ONLY_WITH_WORKERS = ("persistent", "any_order")


def play(name, method, workers):
    torch.manual_seed(5)
    random.seed(6)
    dataset, options = SCENARIOS[name]()
    loader = DataLoader(dataset, num_workers=workers, multiprocessing_context=method if workers else None, **options)
    trainer, seen = Trainer(), {"name": name}
    iterator = None
    for epoch in range(2):
        try:
            iterator = iter(loader)
            for count, batch in enumerate(iterator):
                trainer.step(batch)
                if name == "broken_off" and epoch == 0 and count == 1:
                    break
        except Exception as error:
            frames = [f.name for f in traceback.extract_tb(error.__traceback__) if "headrace" not in f.filename]
            seen["error"] = [type(error).__name__, str(error).splitlines()[-1], frames]
    seen |= {"hashes": trainer.hashes, "losses": trainer.losses, "iterator": type(iterator).__name__}
    seen["num_workers"] = len(getattr(iterator, "_workers", ()))
    if name == "any_order":
        seen["hashes"], seen["losses"] = sorted(trainer.hashes), len(trainer.losses)
    print(json.dumps(seen), flush=True)


def main():
    warnings.filterwarnings("ignore", module="torch.utils.data", category=UserWarning, message=".*pin_memory.*")
    for word in sys.argv[1:]:
        place, _, names = word.partition("/")
        method, workers = place.split(":")
        for name in names.split(",") if names else SCENARIOS:
            if workers != "0" or name not in ONLY_WITH_WORKERS:
                play(name, method, int(workers))
    if "fork:0" in sys.argv:
        multiprocessing.set_start_method("spawn")  # fails when somebody has settled the method before
    print(json.dumps({"name": "path", "path": sys.path, "argv": sys.argv[1:]}))
    sys.exit(3)


if __name__ == "__main__":
    main()
