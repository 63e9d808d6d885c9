"""The plain loop: a DataLoader, a model, an optimizer."""

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 10)

    def forward(self, images):
        hidden = self.features(images)
        journal.inside(images, hidden)
        return self.head(hidden.relu().flatten(1))


torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 3, 8, 8), torch.randint(0, 10, (480,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
while True:
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        journal.step(loss, len(images), optimizer)
