"""Lightning's Trainer.fit with its own demo model and generated data; training and validation loaders."""

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader


class Model(BoringModel):
    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 1600), batch_size=16, shuffle=True, num_workers=2, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(RandomDataset(32, 160), batch_size=16, num_workers=1)


if __name__ == "__main__":
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Model())
    print("done", trainer.global_step)
