"""Batches sequences of similar lengths with its own batch sampler, so batches have many sizes."""

import journal
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

TOKENS = 96


class Sequences(Dataset):
    def __init__(self):
        self.lengths = [4 + number % 13 for number in range(240)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.arange(self.lengths[index]) % 16


class Buckets:
    """Puts as many sequences into a batch as fit into TOKENS, including padding."""

    def __init__(self, lengths):
        self.batches, batch = [], []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if (len(batch) + 1) * lengths[index] > TOKENS:
                self.batches.append(batch)
                batch = []
            batch.append(index)
        self.batches.append(batch)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches[at] for at in torch.randperm(len(self.batches)).tolist())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        hidden = self.body(self.embedding(tokens))
        journal.inside(tokens, hidden, batch="many")
        return self.head(hidden)


torch.manual_seed(0)
data = Sequences()
loader = DataLoader(data, batch_sampler=Buckets(data.lengths), collate_fn=lambda items: pad_sequence(items, batch_first=True))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
while True:
    for tokens in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        journal.step(loss, len(tokens), optimizer)
