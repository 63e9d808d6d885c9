"""Trains a network on a table and keeps a journal that survives a power cut."""

import json
import os
from pathlib import Path
from typing import Any, TextIO

import torch
from meter import Meter, options, revision
from torch import Tensor, nn

REVISION = revision("A")
FEATURES, WIDTH, BATCH = 64, 128, 96


class Journal:
    """One line of JSON for every step, and how far the run has come."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lines = (folder / f"journal-{os.getpid()}.jsonl").open("w")
        self.progress = folder / f"progress-{os.getpid()}.json"

    def write(self, entry: dict[str, Any]) -> None:
        self.lines.write(json.dumps(entry) + "\n")
        self.keep(self.lines)
        new = self.progress.with_suffix(".new")
        with new.open("w") as file:
            json.dump({"step": entry["step"]}, file)
            self.keep(file)
        new.replace(self.progress)

    def keep(self, file: TextIO) -> None:
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
            journal.write({"epoch": epoch, "step": num_steps, "loss": loss.item()})
            if meter.add(len(rows)):
                return


if __name__ == "__main__":
    main()
