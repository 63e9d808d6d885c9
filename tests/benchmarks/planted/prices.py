"""Trains a perceptron that predicts prices."""

import torch
from meter import Meter, options
from torch import nn

FEATURES, WIDTH, BATCH = 512, 1024, 1024


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    rows = torch.randn(BATCH * 10, FEATURES)
    prices = rows[:, :32].sum(1, keepdim=True)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for features, price in zip(rows.split(BATCH), prices.split(BATCH), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(model(features), price)
            loss.backward()
            optimizer.step()
            if meter.add(len(features)):
                return


if __name__ == "__main__":
    main()
