"""Accelerate prepares model, optimizer, loader and schedule, and accumulates gradients."""

import journal
import torch
from accelerate import Accelerator
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
data = TensorDataset(torch.randn(240, 3, 8, 8), torch.randint(0, 10, (240,)))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, loader = Net(), DataLoader(data, batch_size=12, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
gathered = 0
while True:
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        gathered += len(images)
        if accelerator.sync_gradients:
            journal.step(loss, gathered, optimizer)
            gathered = 0
