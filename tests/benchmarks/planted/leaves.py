"""Trains a convolutional network on pictures of leaves."""

import torch
from meter import Meter, options
from torch import nn

CLASSES, SIZE, BATCH = 12, 48, 32


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution with its normalisation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    model = nn.Sequential(
        block(16, 64, 2), block(64, 128, 2), block(128, 128), block(128, 256, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    pictures = torch.randn(BATCH * 12, 16, SIZE, SIZE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (BATCH * 12,))
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for images, classes in zip(pictures.split(BATCH), labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            if meter.add(len(images)):
                return


if __name__ == "__main__":
    main()
