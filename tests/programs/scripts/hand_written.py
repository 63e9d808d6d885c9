"""Uses no optimizer of torch.optim: the program updates its parameters itself, in one of several usual ways.

The first word is `data` (`p.data.add_`), `no_grad` (`p -= lr * p.grad`), `gathered` (like `no_grad`, but only after every third
batch and at the end of an epoch) or `class` (an optimizer class that is not torch's, and an evaluation after each epoch).
"""

import sys

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HOW, EVERY, RATE = sys.argv[1], 3, 0.01


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 10)

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            journal.inside(images, hidden)
        return self.head(hidden.relu().flatten(1))


class Momentum:
    """An optimizer without torch.optim: holds a list of parameters and changes their data."""

    def __init__(self, parameters):
        self.lists = [list(parameters)]
        self.averages = [[torch.zeros_like(p) for p in each] for each in self.lists]

    def step(self):
        for parameters, averages in zip(self.lists, self.averages):  # noqa: B905
            for parameter, average in zip(parameters, averages):  # noqa: B905
                average.mul_(0.9).add_(parameter.grad)
                parameter.data.add_(average, alpha=-RATE)

    def zero_grad(self):
        for parameter in self.lists[0]:
            parameter.grad = None


def write():
    if HOW == "data":
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-RATE)
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(480, 3, 8, 8), torch.randint(0, 10, (480,))), batch_size=12, shuffle=True)
held_out = DataLoader(TensorDataset(torch.randn(48, 3, 8, 8), torch.randint(0, 10, (48,))), batch_size=12)
model = Net()
momentum = Momentum(model.parameters())
while True:
    gathered = 0
    for number, (images, labels) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        gathered += len(images)
        if HOW == "gathered" and number % EVERY and number < len(loader):
            continue
        if HOW == "class":
            momentum.step()
            momentum.zero_grad()
        else:
            write()
            model.zero_grad()
        journal.step(loss, gathered)
        gathered = 0
    if HOW == "class":
        model.eval()
        with torch.no_grad():
            for images, labels in held_out:
                nn.functional.cross_entropy(model(images), labels)
        model.train()
        journal.away()
