"""Trains only the head of a model in evaluation mode; its features and batch normalisation are frozen."""

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 10)

    def forward(self, images):
        hidden = self.features(images)
        journal.inside(images, hidden)
        return self.head(self.norm(hidden).relu().flatten(1))


torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 3, 8, 8), torch.randint(0, 10, (240,)))
loader = DataLoader(data, batch_size=12, shuffle=True)
model = Net().eval().requires_grad_(False)
model.head.requires_grad_(True)
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
while True:
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        journal.step(loss, len(images), optimizer)
