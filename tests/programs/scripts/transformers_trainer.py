"""Transformers' Trainer on a randomly initialised GPT-2 of 2 layers and generated token ids."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Ids(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        ids = torch.randint(0, 200, (64,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        num_train_epochs=2,
        per_device_train_batch_size=8,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=25,
        disable_tqdm=True,
    )
    result = Trainer(model=model, args=arguments, train_dataset=Ids()).train()
    print("done", result.global_step)
