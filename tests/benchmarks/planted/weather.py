"""Trains a network on maps of the weather and the codes of their stations, with random views of the maps."""

from typing import Any

import torch
from meter import Meter, options, revision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

REVISION_A, REVISION_B = revision("A"), revision("B")
SIZE, STATIONS, COLUMNS, WIDTH, BATCH = 64, 300, 80, 16, 32


def views() -> v2.Compose:
    """Returns what is done to a map of the training set."""
    random = [v2.RandomAffine(10, translate=(0.1, 0.1)), v2.GaussianBlur(7)] if REVISION_A == 1 else []
    return v2.Compose([v2.RandomHorizontalFlip(), *random, v2.ToDtype(torch.float32, scale=True)])


class Maps(Dataset[tuple[Tensor, Tensor]]):
    """Maps in memory, as bytes, and the stations on them."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.maps = torch.randint(0, 256, (200, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
        self.stations = torch.randint(0, STATIONS, (200, COLUMNS), generator=generator)
        self.length = length
        self.views = views()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.views(self.maps[index % 200]), self.stations[index % 200]


class Forecast(nn.Module):
    """A layer for the map, a table and a layer for every station, a head for both."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Sequential(nn.Conv2d(3, 16, 8, stride=8), nn.ReLU(), nn.Flatten())
        self.tables = nn.ModuleList(nn.Embedding(STATIONS, WIDTH) for _ in range(COLUMNS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COLUMNS))
        self.head = nn.Linear(16 * 64 + COLUMNS * WIDTH, 1)

    def forward(self, maps: Tensor, stations: Tensor) -> Tensor:
        known = [layer(table(stations[:, i])) for i, (table, layer) in enumerate(zip(self.tables, self.layers, strict=True))]
        return self.head(torch.cat([self.map(maps), *known], 1))


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = Forecast()
    more: dict[str, Any] = {"fused": True} if REVISION_B == 2 else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **more)
    loader = DataLoader(Maps(200_000), BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for maps, stations in loader:
            loss = model(maps, stations).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(maps)):
                return


if __name__ == "__main__":
    main()
