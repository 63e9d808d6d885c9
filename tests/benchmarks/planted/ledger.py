"""Trains a wide network on large rows and keeps its memory flat."""

import gc

import torch
from meter import Meter, options, revision
from torch import nn

REVISION = revision("A")
FEATURES, WIDTH, BATCH = 768, 1024, 1024


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), *layers, nn.Linear(WIDTH, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    inputs, labels = torch.randn(BATCH * 12, FEATURES), torch.randint(0, 32, (BATCH * 12,))
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for rows, classes in zip(inputs.split(BATCH), labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(rows), classes)
            loss.backward()
            optimizer.step()
            if REVISION == 1:
                gc.collect()
            if meter.add(len(rows)):
                return


if __name__ == "__main__":
    main()
