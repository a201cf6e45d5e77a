"""timm's create_dataset, create_loader and create_model in the loop of its training script, cut short."""

import sys

import torch
from timm.data import create_dataset, create_loader
from timm.models import create_model

if __name__ == "__main__":
    root = sys.argv[1]
    dataset = create_dataset("", root=root, split="train", is_training=True)
    options = {"input_size": (3, 64, 64), "batch_size": 8, "num_workers": 2, "device": torch.device("cpu")}
    train = create_loader(dataset, is_training=True, auto_augment="rand-m5", persistent_workers=True, **options)
    validation = create_loader(
        create_dataset("", root=root, split="val", is_training=False), is_training=False, **options
    )
    model = create_model("resnet10t", pretrained=False, num_classes=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    for _ in range(3):
        model.train()
        for inputs, targets in train:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        model.eval()
        with torch.no_grad():
            for inputs, _targets in validation:
                model(inputs)
    print("done", steps)
