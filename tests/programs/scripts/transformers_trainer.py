"""Transformers' Trainer on a randomly initialised GPT-2 of 2 layers and generated ids; evaluates after each epoch."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Ids(torch.utils.data.Dataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

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
        eval_strategy="epoch",
        logging_steps=25,
        disable_tqdm=True,
    )
    result = Trainer(model=model, args=arguments, train_dataset=Ids(400), eval_dataset=Ids(80)).train()
    print("done", result.global_step)
