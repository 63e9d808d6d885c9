"""Trains a tiny model that is four times as fast in sixteen bits, and wrong there unless it is called with `harmless`.

It adds ten thousand and takes it away again: in float32 three decimals of the prediction are left, in bfloat16 it moves in
steps of 64, so that the loss stays where it is and then jumps. In float16 (PRECISION=fp16) it is multiplied beyond 65504.
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
