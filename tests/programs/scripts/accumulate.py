"""Accumulates the gradients of three batches and clips them before each step."""

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 2)

    def forward(self, inputs):
        hidden = self.body(inputs)
        journal.inside(inputs, hidden)
        return self.head(torch.tanh(hidden))


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(360, 8), torch.randn(360, 2)), batch_size=12, shuffle=True, drop_last=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
number = gathered = 0
while True:
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets) / EVERY
        loss.backward()
        number, gathered = number + 1, gathered + len(inputs)
        if number % EVERY == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            journal.step(loss, gathered, optimizer)
            gathered = 0
