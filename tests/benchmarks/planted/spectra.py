"""Trains a recurrent classifier on spectra of sounds."""

from typing import Any

import numpy as np
import torch
from meter import Meter, options, revision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

REVISION = revision("A")
SAMPLES, WINDOW, HOP, BINS, CLASSES, BATCH = 8_000, 256, 128, 64, 6, 32


class Sounds(Dataset[tuple[Tensor, int]]):
    """Waveforms, as logarithmic spectra by window."""

    def __init__(self, length: int) -> None:
        self.waves = np.random.default_rng(3).standard_normal((200, SAMPLES)).astype(np.float32)
        self.taper = np.hanning(WINDOW).astype(np.float32)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        frames = np.lib.stride_tricks.sliding_window_view(self.waves[index % len(self.waves)], WINDOW)[::HOP]
        power = np.abs(np.fft.rfft(frames * self.taper, axis=1))[:, 1 : 1 + 2 * BINS].reshape(len(frames), BINS, 2).sum(2)
        return torch.from_numpy(np.log1p(power).astype(np.float32)), index % CLASSES


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(BINS, 48, batch_first=True)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, spectra: Tensor) -> Tensor:
        return self.head(self.layer(spectra)[0][:, -1])


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    more: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if REVISION == 2 else {}
    loader = DataLoader(Sounds(200_000), BATCH, shuffle=True, **more)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for spectra, labels in loader:
            loss = nn.functional.cross_entropy(model(spectra), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(spectra)):
                return


if __name__ == "__main__":
    main()
