"""Trains for 40 steps; prints the losses, and which attributes of torch are headrace's before and after."""

import json
import sys
import types
import warnings

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.rand(4)


def foreign():
    """Names of functions in torch that are not torch's."""
    warnings.simplefilter("ignore")  # torch has attributes that warn when they are looked at
    found = set()
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "torch"]:
        for name, value in list(vars(module).items()):
            places = vars(value).values() if isinstance(value, type) and value.__module__.startswith("torch") else ()
            for item in (value, *places):
                if isinstance(item, types.FunctionType) and "headrace" in item.__code__.co_filename:
                    found.add(f"{module.__name__}.{name}:{item.__name__}")
    hooks = sys.modules["torch.optim.optimizer"]
    count = len(hooks._global_optimizer_pre_hooks) + len(hooks._global_optimizer_post_hooks)
    return sorted(found), count, sum("headrace" in type(f).__module__ for f in sys.meta_path)


def main():
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    losses, before = [], foreign()
    for batch in DataLoader(Numbers(), batch_size=2, num_workers=int(sys.argv[1]), shuffle=True):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    print(json.dumps({"losses": losses, "before": before, "after": foreign()}))


if __name__ == "__main__":
    main()
