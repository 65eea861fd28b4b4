"""Train a tiny GPT-2, made from a config, by the Trainer of transformers over offbeat:

torchrun --nproc-per-node 2 examples/03_transformers.py
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import offbeat
from offbeat.integrations.transformers import OffbeatTrainer


class Counting(Dataset):
    """Texts of unlike length that count up: "7 8 9 10"."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        length = 4 + index * 7 % 13
        text = torch.zeros(16, dtype=torch.long)
        text[:length] = 1 + (index + torch.arange(length)) % 31
        labels = text.masked_fill(torch.arange(16) >= length, -100)
        return {"input_ids": text, "labels": labels}


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2, loss_type="ForCausalLMLoss"
    )
    arguments = TrainingArguments(
        output_dir="checkpoints",
        num_train_epochs=6,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        max_grad_norm=1.0,  # of the mean, as with DDP
        logging_steps=1,  # nobody waits for it
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = OffbeatTrainer(  # instead of Trainer
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Counting(),
        eval_dataset=Counting(),
        algorithm=offbeat.EagerSGD(),
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if offbeat.rank() == 0:
        print(f"workers {offbeat.world_size()}   loss {loss:.3f}")
