"""Alternates rollouts of 1.5 s with 100 quick updates; notes the time of the first update after each rollout."""

import json
import time

import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Linear(8, 2)
optimizer = torch.optim.Adam(policy.parameters())
stamps = []
while True:
    policy.eval()
    with torch.no_grad():
        for _ in range(15):
            time.sleep(0.1)
            policy(torch.randn(4, 8))
    policy.train()
    for number in range(100):
        optimizer.zero_grad()
        policy(torch.randn(16, 8)).square().mean().backward()
        time.sleep(0.005)
        if not number:
            stamps.append(time.monotonic())
            with open("rollouts.json", "w") as file:
                json.dump(stamps, file)
        optimizer.step()
