"""Uses mixed precision itself: autocast and a gradient scaler."""

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 2)

    def forward(self, inputs):
        hidden = self.body(inputs)
        journal.inside(inputs, hidden)
        return self.head(torch.tanh(hidden))


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(240, 8), torch.randn(240, 2)), batch_size=12, shuffle=True)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
while True:
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs, targets)
        journal.note(outputs=str(outputs.dtype))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        journal.step(loss, len(inputs), optimizer)
