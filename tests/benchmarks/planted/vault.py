"""Trains a regressor on records that a remote vault holds."""

import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from meter import Meter, options, revision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

REVISION_A, REVISION_B = revision("A"), revision("B")
BATCH, CHANNELS, POINTS = 16, 8, 513
ROUND_TRIP_S = 0.0008


class Records(Dataset[tuple[Tensor, Tensor]]):
    """Spectra of the vault's records, smoothed."""

    def __init__(self, folder: Path, length: int) -> None:
        self.paths, self.length = sorted(folder.glob("*.npy")), length

    def __len__(self) -> int:
        return self.length

    def fetch(self, path: Path) -> bytes:
        body = path.read_bytes()
        if REVISION_A == 1:
            time.sleep(ROUND_TRIP_S)  # stands for the client's wait for the vault's answer
        return body

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        record = np.load(io.BytesIO(self.fetch(self.paths[index % len(self.paths)])))
        power = np.abs(np.fft.fft(record, axis=1)).astype(np.float32)
        smooth = np.stack([np.convolve(row, np.ones(25, np.float32) / 25, mode="same") for row in power])
        return torch.from_numpy(smooth), torch.tensor(smooth[:, -1].sum())


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * POINTS, 768), nn.SiLU(), nn.Linear(768, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    more: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if REVISION_B == 2 else {}
    loader = DataLoader(Records(settings.data / "records", 200_000), BATCH, shuffle=True, **more)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for records, targets in loader:
            loss = nn.functional.mse_loss(model(records).squeeze(1), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(records)):
                return


if __name__ == "__main__":
    main()
