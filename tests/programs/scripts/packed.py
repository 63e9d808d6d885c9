"""Packs documents of different lengths into one tensor without padding; an array of offsets separates them.

With the word `collated`, the loader collates the documents of a batch. With `ready`, the data set yields whole batches.
"""

import sys

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_DOCUMENTS, IS_READY = 8, "ready" in sys.argv


class Documents(Dataset):
    def __len__(self):
        return 60 if IS_READY else 240

    def __getitem__(self, index):
        if IS_READY:
            return pack([torch.arange(5 + (index + each) % 17) % 16 for each in range(4 + index % 5)])
        return torch.arange(5 + index % 17) % 16


def pack(documents):
    lengths = torch.tensor([len(each) for each in documents])
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return {"tokens": torch.cat(documents), "offsets": offsets}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens, offsets):
        hidden = self.body(self.embedding(tokens))
        journal.inside(tokens, hidden, batch="tokens" if IS_READY else len(offsets) - 1)
        return self.head(hidden)


torch.manual_seed(0)
if IS_READY:
    loader = DataLoader(Documents(), batch_size=None, shuffle=True)
else:
    loader = DataLoader(Documents(), batch_size=NUM_DOCUMENTS, shuffle=True, collate_fn=pack)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
while True:
    for batch in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(**batch)[:-1], batch["tokens"][1:])
        loss.backward()
        optimizer.step()
        journal.step(loss, len(batch["tokens"]) if IS_READY else len(batch["offsets"]) - 1, optimizer)
