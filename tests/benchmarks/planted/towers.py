"""Trains a recommender: a table and a small tower for each of many columns."""

import torch
from meter import Meter, options, revision
from torch import Tensor, nn

REVISION = revision("A")
COLUMNS, ENTRIES, WIDTH, BATCH = 64, 500, 16, 128


class Tower(nn.Module):
    """One column's table and what is made of an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ENTRIES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, entries: Tensor) -> Tensor:
        return torch.relu(self.layer(self.table(entries)))


class Recommender(nn.Module):
    """All towers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower() for _ in range(COLUMNS))
        self.head = nn.Sequential(nn.Linear(COLUMNS * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.cat([tower(rows[:, i]) for i, tower in enumerate(self.towers)], 1))


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = Recommender()
    more = {"fused": True} if REVISION == 2 else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **more)
    rows, clicks = torch.randint(0, ENTRIES, (BATCH * 60, COLUMNS)), torch.randint(0, 2, (BATCH * 60, 1)).float()
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for entries, clicked in zip(rows.split(BATCH), clicks.split(BATCH), strict=True):
            loss = nn.functional.binary_cross_entropy_with_logits(model(entries), clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(entries)):
                return


if __name__ == "__main__":
    main()
