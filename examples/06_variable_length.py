"""Texts of very different length: nobody waits for the long ones, and every token counts the same.

torchrun --nproc-per-node 2 examples/06_variable_length.py
offbeat simulate examples/06_variable_length.py --cluster text-8
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import offbeat

PAD = 0


class Counting(Dataset):
    """Texts that count up, from anywhere: "7 8 9 ... 30 31 1 2". Most are short, a few are long."""

    def __init__(self, texts: int = 256) -> None:
        draw = torch.Generator().manual_seed(0)
        lengths = 4 + (60 * torch.rand(texts, generator=draw) ** 4).long()
        begins = torch.randint(31, (texts,), generator=draw)
        self.texts = [
            1 + (begin + torch.arange(length)) % 31
            for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.texts[index]


class Model(nn.Module):
    """The next token, by a small GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16, padding_idx=PAD)
        self.body, self.head = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens))[0])


torch.manual_seed(0)
torch.set_num_threads(1)
data = Counting()
deal = offbeat.Deal(data, batch_size=4)
loader = DataLoader(
    data, batch_sampler=deal, collate_fn=lambda texts: pad_sequence(texts, batch_first=True)
)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

with offbeat.attach(model, optimizer, offbeat.EagerSGD(), clip_norm=1.0) as dp:
    for _ in range(4):
        for tokens in loader:
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            optimizer.zero_grad()
            dp.samples(int((targets != PAD).sum()))  # what the loss is a mean over
            logits = model(inputs).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=PAD)
            loss.backward()
            optimizer.step()

if offbeat.rank() == 0:
    with torch.no_grad():
        text = torch.arange(1, 32).unsqueeze(0)
        loss = nn.functional.cross_entropy(model(text[:, :-1])[0], text[0, 1:]).item()
    stats = dp.stats()
    print(f"workers {dp.world_size}   rounds {stats.rounds}   loss {loss:.3f}")
