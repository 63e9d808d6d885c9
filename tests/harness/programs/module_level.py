"""A training program with its loader at module level and its training under the guard, as in PyTorch's VAE example."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

train_loader = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4, shuffle=True, num_workers=2)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train():
    while True:
        for (x,) in train_loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    train()
