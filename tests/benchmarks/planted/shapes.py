"""Trains a classifier of shapes, shifted and turned over by the loader."""

import torch
from meter import Meter, options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CLASSES, SIZE, BATCH = 8, 32, 128


class Shapes(Dataset[tuple[Tensor, int]]):
    """Pictures in memory, as bytes."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self.pictures = torch.randint(0, 256, (1_000, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.pictures[index % len(self.pictures)].roll(index % 3, -1)
        return (picture.flip(-1) if index % 2 else picture), index % CLASSES


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 256, 4, stride=4), nn.GELU(), nn.Conv2d(256, 512, 2, stride=2), nn.GELU(),
        nn.Flatten(), nn.Linear(512 * 16, 512), nn.GELU(), nn.Linear(512, CLASSES),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    loader = DataLoader(Shapes(400_000), BATCH, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for images, labels in loader:
            batch = images.float().div_(255.0).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            if meter.add(len(images)):
                return


if __name__ == "__main__":
    main()
