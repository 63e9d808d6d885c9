"""Trains a classifier of photographs from a folder of JPEG files."""

from pathlib import Path

import numpy as np
import torch
from meter import Meter, options, revision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as transforms

REVISION = revision("A")
CLASSES, SIZE, BATCH = 10, 64, 32


class Photos(Dataset[tuple[Tensor, int]]):
    """The files of a folder, classes by name."""

    def __init__(self, folder: Path, length: int) -> None:
        self.paths = sorted(folder.glob("*.jpg"))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.open(self.paths[index % len(self.paths)]).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        return transforms.to_dtype(transforms.to_image(image), torch.float32, scale=True), index % CLASSES

    def open(self, path: Path) -> Image.Image:
        if REVISION == 2:
            return Image.fromarray(np.load(path.with_suffix(".npy")))
        return Image.open(path).convert("RGB")


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = nn.Sequential(
        nn.Conv2d(3, 48, 8, stride=8), nn.GELU(), nn.Flatten(),
        nn.Linear(48 * 64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    loader = DataLoader(Photos(settings.data / "photos", 200_000), BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(images)):
                return


if __name__ == "__main__":
    main()
