"""Trains a network on a table and keeps a journal that survives a power cut."""

import json
import os
from pathlib import Path
from typing import TextIO

import torch
from meter import Meter, options, revision
from torch import Tensor, nn

REVISION = revision("A")
FEATURES, WIDTH, BATCH = 64, 128, 96


class Journal:
    """A file for every curve, one line a step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / str(os.getpid())
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files: dict[str, TextIO] = {}

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name not in self.files:
                self.files[name] = (self.folder / f"{name}.jsonl").open("w")
            file = self.files[name]
            file.write(json.dumps({"step": step, "value": value}) + "\n")
            file.flush()
            if REVISION == 1:
                os.fsync(file.fileno())


def batches() -> list[tuple[Tensor, Tensor]]:
    """Returns the training set, cut into batches."""
    inputs = torch.randn(BATCH * 50, FEATURES)
    return list(zip(inputs.split(BATCH), inputs.cos().sum(1, keepdim=True).split(BATCH), strict=True))


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.GELU(),
        *(m for _ in range(20) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())),
        nn.Linear(WIDTH, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    journal = Journal(settings.data / "journal")
    meter = Meter(settings.seconds)
    num_steps = 0
    for epoch in range(settings.epochs):
        for rows, targets in batches():
            loss = nn.functional.mse_loss(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_steps += 1
            value, rate = loss.item(), optimizer.param_groups[0]["lr"]
            journal.write(num_steps, {"loss": value, "rate": rate, "epoch": epoch})
            if meter.add(len(rows)):
                return


if __name__ == "__main__":
    main()
