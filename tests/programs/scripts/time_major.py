"""Time is the first dimension and the batch is the second, as is common for recurrent networks."""

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 6


def time_major(items):
    return torch.stack([each for (each,) in items], dim=1)  # (time, batch, features)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.recurrent, self.head = nn.Linear(4, 8), nn.GRU(8, 8), nn.Linear(8, 4)

    def forward(self, inputs):
        hidden = self.body(inputs)
        journal.inside(inputs, hidden, batch=inputs.shape[1])
        return self.head(self.recurrent(hidden)[0])


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(250, LENGTH, 4)), batch_size=12, shuffle=True, collate_fn=time_major)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
while True:
    for inputs in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs)[:-1], inputs[1:])
        loss.backward()
        optimizer.step()
        journal.step(loss, inputs.shape[1], optimizer)
