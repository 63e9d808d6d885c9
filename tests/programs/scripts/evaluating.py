"""Evaluates on held-out data repeatedly. The same line of code makes both loaders."""

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY = 60


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 10)

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            journal.inside(images, hidden)
        else:
            journal.note(held_out=[len(images), str(hidden.dtype)])
        return self.head(hidden.relu().flatten(1))


def load(count, shuffle, batch_size):
    data = TensorDataset(torch.randn(count, 3, 8, 8), torch.randint(0, 10, (count,)))
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def evaluate():
    journal.away()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in held_out)
    model.train()
    return right


torch.manual_seed(0)
held_out = load(200, False, 40)
loader = load(240, True, 12)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
evaluate()
number = 0
while True:
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        journal.step(loss, len(images), optimizer)
        number += 1
        if number % EVERY == 0:
            evaluate()
