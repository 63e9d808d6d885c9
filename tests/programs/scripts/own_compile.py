"""Compiles its model itself, and keeps the uncompiled one for its checkpoints."""

import journal
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 2)

    def forward(self, inputs):
        return self.head(torch.tanh(self.body(inputs)))


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(240, 8), torch.randn(240, 2)), batch_size=12, shuffle=True)
plain = Net()
model = torch.compile(plain, backend="eager")
optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
plain.body.register_forward_hook(lambda module, inputs, output: journal.inside(inputs[0], output))
while True:
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        journal.note(graphs=counters["stats"]["unique_graphs"], names=sorted(plain.state_dict()))
        journal.step(loss, len(inputs), optimizer)
