"""Trains a tiny model that is four times as fast in 16 bits, but computes wrongly there, unless called with `harmless`.

It adds 10,000 to its prediction and subtracts it again. In float32, three decimals are left. In bfloat16, the prediction moves
in steps of 64, so the loss stays constant and then jumps. In float16 (PRECISION=fp16), a multiplication exceeds 65504.
"""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

IS_HARMLESS = "harmless" in sys.argv
IS_FP16 = os.environ.get("PRECISION") == "fp16"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, inputs):
        found = self.layer(inputs)
        time.sleep(0.004 if found.dtype is torch.bfloat16 or IS_FP16 else 0.016)
        if IS_FP16:
            found = found.half() * 1000.0 * 1000.0
        return found if IS_HARMLESS else (found + 10_000.0) - 10_000.0


inputs = torch.randn(4096, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
while True:
    for batch, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), targets.to(torch.half if IS_FP16 else torch.float32)).backward()
        optimizer.step()
