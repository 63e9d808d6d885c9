"""Trains a convolutional network on tiles of a satellite's picture."""

import contextlib

import torch
from meter import Meter, options, revision
from torch import nn

REVISION = revision("A")
CLASSES, SIZE, BATCH = 12, 48, 16


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution with its normalisation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    model = nn.Sequential(
        block(8, 48), block(48, 96, 2), block(96, 96), block(96, 192, 2), block(192, 192),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, CLASSES),
    )  # fmt: skip
    tiles, labels = torch.randn(BATCH * 16, 8, SIZE, SIZE), torch.randint(0, CLASSES, (BATCH * 16,))
    precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if REVISION == 2:
        model, tiles = model.to(memory_format=torch.channels_last), tiles.contiguous(memory_format=torch.channels_last)
        precision = torch.autocast("cpu", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for images, classes in zip(tiles.split(BATCH), labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            with precision:
                loss = nn.functional.cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            if meter.add(len(images)):
                return


if __name__ == "__main__":
    main()
