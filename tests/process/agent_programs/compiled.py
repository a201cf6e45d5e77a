"""A compiled model, a compiled step, TorchScript and autocast; prints what dynamo counted, and the losses."""

import json
import sys

import torch
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((4,), float(index) / 12)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.layer(x.to(torch.float32))).cpu().square()


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).sum()


def train(model, optimizer, step):
    losses = []
    for batch in DataLoader(Numbers(), batch_size=4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = scripted(model(batch))
        loss.backward()
        step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def main():
    if "hook-tensors" in sys.argv:  # as the agent does once CUDA is in use
        device = sys.modules.get("_headrace_agent.device")
        if device is not None:
            device._patch_tensor(torch)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = train(torch.compile(net, backend="aot_eager"), optimizer, optimizer.step)
    losses += train(torch.compile(net, backend="eager"), optimizer, torch.compile(optimizer.step, backend="eager"))

    @torch.compile(backend="eager")
    def whole(batch):
        torch.autograd.backward(net(batch).sum())
        return batch.to(torch.float64)

    whole(torch.ones(4, 4))
    seen = {key: sum(counters[key].values()) for key in ("graph_break", "recompiles", "unimplemented")}
    seen |= counters["stats"]
    explained = torch._dynamo.explain(net)(torch.ones(4, 4))
    print(json.dumps({"losses": losses, "counters": seen, "breaks": explained.graph_break_count}))


if __name__ == "__main__":
    main()
