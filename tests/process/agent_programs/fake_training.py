"""A training loop over the fake torch: ``fake_training.py METHOD SECONDS``; at least three epochs of four batches.

With SECONDS other than 0 a sample takes 50 ms.
"""

import json
import os
import sys
import time

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake"))
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader


class Squares:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.05 if sys.argv[2:3] != ["0"] else 0)
        return index * index


def main():
    method, seconds = sys.argv[1], float(sys.argv[2])
    optimizer, seen = Optimizer(), []
    begin, epoch = time.monotonic(), 0
    while epoch < 3 or time.monotonic() - begin < seconds:
        loader = DataLoader(Squares(), batch_size=2, num_workers=epoch % 2, multiprocessing_context=method)
        for batch in loader:
            if hasattr(torch.autograd, "backward"):
                torch.autograd.backward(batch)
            optimizer.step()
            seen.append(batch)
        epoch += 1
    torch.save(seen, os.devnull)
    facts = {"seen": seen[:12], "path": sys.path, "site": "sitecustomize" in sys.modules, "steps": optimizer.num_steps}
    facts["usercustomize"] = getattr(sys, "user_was_here", None)
    facts["sitecustomize"] = getattr(sys, "site_was_here", None)
    print(json.dumps(facts))
    sys.exit(7)


if __name__ == "__main__":
    main()
