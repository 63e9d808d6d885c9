"""Reinforcement learning: the policy acts on single observations without gradients, then learns from them."""

import journal
import torch
from torch import nn

ROUNDS = 32


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, observations):
        hidden = self.body(observations)
        if torch.is_grad_enabled():
            journal.inside(observations, hidden)
        return self.head(torch.tanh(hidden))


def play(observation, action):
    return torch.roll(observation, 1) + 0.1 * action, float(observation[action])


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
while True:
    observation, seen, actions, rewards = torch.randn(4), [], [], []
    with torch.no_grad():
        for _ in range(ROUNDS):
            action = int(torch.distributions.Categorical(logits=policy(observation[None])[0]).sample())
            seen.append(observation)
            actions.append(action)
            observation, reward = play(observation, action)
            rewards.append(reward)
    chances = torch.distributions.Categorical(logits=policy(torch.stack(seen)))
    loss = -(chances.log_prob(torch.tensor(actions)) * torch.tensor(rewards)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    journal.step(loss, ROUNDS, optimizer)
