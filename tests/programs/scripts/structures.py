"""Each batch is a frozen dataclass with a named tuple and a dictionary; the model returns another dataclass."""

import dataclasses
from typing import NamedTuple

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    name: str
    pair: Pair
    extra: dict


@dataclasses.dataclass(frozen=True)
class Outputs:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Data(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        return torch.full((4,), index / 240), index % 2


def collate(items):
    inputs = torch.stack([each for each, _ in items])
    return Batch("pairs", Pair(inputs, -inputs), {"labels": torch.tensor([label for _, label in items])})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, *, batch):
        hidden = self.body(batch.pair.left + batch.pair.right.square())
        journal.inside(batch.pair.left, hidden)
        return Outputs(logits=self.head(hidden.relu()))


torch.manual_seed(0)
loader = DataLoader(Data(), batch_size=12, shuffle=True, collate_fn=collate)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for batch in loader:
        optimizer.zero_grad()
        outputs = model(batch=batch)
        loss = nn.functional.cross_entropy(outputs.logits, batch.extra["labels"])
        loss.backward()
        optimizer.step()
        journal.note(outputs=str(outputs.logits.dtype))
        journal.step(loss, len(batch.pair.left), optimizer)
