"""Trains a classifier of textures, with random views of every image."""

import torch
from meter import Meter, options, revision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

REVISION = revision("A")
CLASSES, SIZE, BATCH = 20, 80, 32


def views() -> v2.Compose:
    """Returns what is done to an image of the training set."""
    steps: list[nn.Module] = [v2.RandomCrop(64), v2.RandomHorizontalFlip()]
    if REVISION == 1:
        steps += [v2.ColorJitter(0.4, 0.4), v2.GaussianBlur(7, sigma=(0.1, 2.0))]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    return v2.Compose(steps)


class Textures(Dataset[tuple[Tensor, int]]):
    """Images in memory, as bytes."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randint(0, 256, (256, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
        self.length = length
        self.views = views()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.views(self.images[index % len(self.images)]), index % CLASSES


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = nn.Sequential(
        nn.Conv2d(3, 64, 8, stride=8), nn.GELU(), nn.Flatten(), nn.Linear(64 * 64, 512), nn.GELU(), nn.Linear(512, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    loader = DataLoader(Textures(200_000), BATCH, shuffle=True, num_workers=2, persistent_workers=True)
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
