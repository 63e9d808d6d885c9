"""Trains without an optimizer, and says when a step is done."""

import sys

import torch

import autotune

torch.manual_seed(0)
weights = torch.zeros(64, 64, requires_grad=True)
samples = {"samples": 16} if "samples" in sys.argv else {}
for _ in range(10**6 if "long" in sys.argv else 20):
    x = torch.randn(16, 64)
    ((x @ weights - x) ** 2).mean().backward()
    with torch.no_grad():
        weights -= 0.1 * weights.grad
    weights.grad = None
    autotune.trial_step(**samples)
print("over")
