"""A small convolutional net whose step is launch-bound, on images that take time to prepare."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import transforms

NUM_CLASSES = 10
NUM_IMAGES = 20_000
NUM_PIXELS = 32  # height and width
NUM_CHANNELS = 16
NUM_STAGES, NUM_BLOCKS = 3, 4  # number of stages, and of blocks per stage; a block is a convolution, a normalisation and a ReLU


def build_model() -> nn.Module:
    """Returns the net: images of 3 x 32 x 32 to logits of 10 classes."""
    return _net(num_channels=NUM_CHANNELS, num_blocks=NUM_BLOCKS)


def build_deep_model() -> nn.Module:
    """Returns a net of the same kind that is half as wide and twice as deep."""
    return _net(num_channels=NUM_CHANNELS // 2, num_blocks=2 * NUM_BLOCKS)


def _net(*, num_channels: int, num_blocks: int) -> nn.Module:
    layers: list[nn.Module] = []
    num_inputs = 3
    for _ in range(NUM_STAGES):
        for block in range(num_blocks):
            stride = 2 if block == 0 else 1
            layers += [nn.Conv2d(num_inputs, num_channels, 3, stride=stride, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(num_channels), nn.ReLU()]
            num_inputs = num_channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_channels, NUM_CLASSES))


class Images(Dataset):
    """Random images in memory, prepared in the usual way for CIFAR-10: padded, cropped, flipped, normalised."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._images = rng.integers(0, 256, (512, NUM_PIXELS, NUM_PIXELS, 3), dtype=np.uint8)
        self._prepare = transforms.Compose(
            [
                transforms.RandomCrop(NUM_PIXELS, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
            ]
        )

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._prepare(Image.fromarray(self._images[index % len(self._images)])), index % NUM_CLASSES


def build_data() -> Dataset:
    """Returns the data set: 20,000 images of 3 x 32 x 32, float32."""
    return Images()
