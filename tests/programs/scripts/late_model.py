"""Builds its model from the first batch, and later replaces it by larger ones, each with a new optimizer."""

import gc
import weakref

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY = 40


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features, self.head = nn.LazyConv2d(width, 3), nn.LazyLinear(10)

    def forward(self, images):
        hidden = self.features(images)
        journal.inside(images, hidden)
        return self.head(hidden.relu().flatten(1))


torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 3, 8, 8), torch.randint(0, 10, (240,)))
loader = DataLoader(data, batch_size=12, shuffle=True)
model, number, earlier = None, 0, []
while True:
    for images, labels in loader:
        if number in (0, EVERY, 2 * EVERY):
            model = optimizer = loss = None
            gc.collect()
            journal.note(kept_alive=sum(each() is not None for each in earlier))
            model = Net(4 + number // EVERY)
            with torch.no_grad():
                model(images)  # the first call gives the lazy layers their shapes
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            earlier.append(weakref.ref(model))
        number += 1
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        journal.step(loss, len(images), optimizer)
