"""A plain loop that Accelerate prepares; started by ``accelerate launch``."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(1024, 32), torch.randn(1024, 1))
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for _ in range(2):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
    # One write, so that the lines of two ranks never mix.
    print(f"done {accelerator.process_index} {steps}\n", end="", flush=True)
    accelerator.end_training()
