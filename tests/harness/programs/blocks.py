"""Trains repeated blocks with attention, dropout and batch normalisation; prints its losses and running statistics."""

import sys

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.2)
        self.expand, self.shrink = nn.Linear(16, 32), nn.Linear(32, 16)
        if "spectral" in sys.argv:
            self.expand = spectral_norm(self.expand)

    def forward(self, x, factor=1.0):
        mixed = x + self.drop(self.attention(x, x, x, need_weights=False)[0])
        return self.norm(mixed + factor * self.shrink(torch.relu(self.expand(mixed))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3)) if "single" not in sys.argv else Block()
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        for block in self.blocks if isinstance(self.blocks, nn.ModuleList) else [self.blocks]:
            x = checkpoint(block, x, 0.5, use_reentrant=False) if "checkpointed" in sys.argv else block(x, factor=0.5)
        return self.head(x[:, 0])


torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 5, 16), torch.randint(0, 2, (256,)))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
compiled = []
if "eager" in sys.argv:  # stands in for the compiler

    def compile_it(module, **options):
        compiled.append(type(module).__name__)
        module._compiled_call_impl = module._call_impl

    nn.Module.compile = compile_it
norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
with open("losses.txt", "w") as told:
    while True:
        for x, y in DataLoader(data, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            outputs = model(x)
            if compiled:
                print(*compiled, file=told)
                compiled.clear()
            loss = nn.functional.cross_entropy(outputs, y)
            loss.backward()
            means = [norm.running_mean.sum().item().hex() for norm in norms]
            print(loss.item().hex(), *means, *(int(norm.num_batches_tracked) for norm in norms), file=told, flush=True)
            optimizer.step()
