"""Trains a small convolutional network on scenes; every step's loss is on disk when the step ends."""

import contextlib
import os
import time
from pathlib import Path

import torch
from meter import Meter, options, revision
from torch import nn

REVISION_A, REVISION_B = revision("A"), revision("B")
CLASSES, SIZE, BATCH = 12, 32, 8


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution with its normalisation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def note(folder: Path, **values: float) -> None:
    """Adds a line to the file of every value."""
    for name, value in values.items():
        with (folder / f"{name}.txt").open("a") as file:
            print(value, file=file, flush=True)
            if REVISION_A == 1:
                os.fsync(file.fileno())


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    model = nn.Sequential(
        block(8, 64), block(64, 96, 2), block(96, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)
    )
    scenes, labels = torch.randn(BATCH * 16, 8, SIZE, SIZE), torch.randint(0, CLASSES, (BATCH * 16,))
    precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if REVISION_B == 2:
        model, scenes = model.to(memory_format=torch.channels_last), scenes.contiguous(memory_format=torch.channels_last)
        precision = torch.autocast("cpu", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    folder = settings.data / f"losses-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    meter = Meter(settings.seconds)
    step = 0
    for epoch in range(settings.epochs):
        for images, classes in zip(scenes.split(BATCH), labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            with precision:
                guesses = model(images)
                loss = nn.functional.cross_entropy(guesses, classes)
            loss.backward()
            optimizer.step()
            right = (guesses.argmax(1) == classes).float().mean().item()
            norms = {"first": model[0][0].weight.norm().item(), "last": model[-1].weight.norm().item()}
            step += 1
            note(folder, step=step, epoch=epoch, loss=loss.item(), right=right, **norms, seconds=time.monotonic())
            if meter.add(len(images)):
                return


if __name__ == "__main__":
    main()
