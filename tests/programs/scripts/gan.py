"""Trains two networks in turn, each with its own optimizer and loss."""

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NOISE = 6


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, samples):
        hidden = self.body(samples)
        journal.inside(samples, hidden)
        return self.head(hidden.relu())


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(240, 4)), batch_size=12, shuffle=True)
generator, critic = nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 4)), Critic()
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
judge = nn.functional.binary_cross_entropy_with_logits
while True:
    for (real,) in loader:
        made = generator(torch.randn(len(real), NOISE))
        for_critic.zero_grad()
        ones = torch.ones(len(real), 1)
        loss = judge(critic(real), ones) + judge(critic(made.detach()), 1 - ones)
        loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        fooled = judge(critic(made), ones)
        fooled.backward()
        for_generator.step()
        journal.note(both_fused=[bool(o.param_groups[0].get("fused")) for o in (for_generator, for_critic)])
        journal.step(loss + fooled, len(real), for_critic)
