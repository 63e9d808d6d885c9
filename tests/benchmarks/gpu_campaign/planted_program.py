"""Trains with one planted cause that costs time on a GPU, or with none; the script does not use autotune.

    python -m tests.benchmarks.gpu_campaign.planted_program copies                          # trains forever
    python -m tests.benchmarks.gpu_campaign.planted_program copies --mended --seconds 10    # without the cause; prints the rate

The planted cause is one of: `copies` of pageable batches, for which the host waits; `numbers` read from the device within the
step; `launches` of many small operators; `float32` products, which Tensor Cores would compute faster in 16 bits; `nothing`.
"""

import argparse
import contextlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.benchmarks.image_program import FOREVER_S, rate

PLANTED = ("copies", "numbers", "launches", "float32", "nothing")
CLASSES = 10


class Rows(TensorDataset):
    """Tensors whose batches are slices, so that the input costs a GPU no time."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """Returns the rows of a batch, which are adjacent."""
        return [each[indices[0] : indices[-1] + 1] for each in self.tensors]


class Network(nn.Module):
    """Layers. With `is_watched`, the host reads the largest value after each layer."""

    def __init__(self, width: int, depth: int, *, is_watched: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.head, self.is_watched, self.largest = nn.Linear(width, CLASSES), is_watched, 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores, of shape [batch, CLASSES]."""
        for layer in self.layers:
            x = x + layer(x)
            if self.is_watched:
                self.largest = max(self.largest, x.abs().max().item())
        scores: Tensor = self.head(x)
        return scores


def batches(loader: "DataLoader[tuple[Tensor, ...]]", device: str, *, is_blocking: bool) -> Iterator[list[Tensor]]:
    """Yields the loader's batches on the device forever."""
    while True:
        for batch in loader:
            yield [each.to(device, non_blocking=not is_blocking) for each in batch]


def main() -> None:
    """Trains; with --seconds, measures and prints the rate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("planted", choices=PLANTED)
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--seconds", type=float, default=FOREVER_S, help="length of the measurement")
    options = parser.parse_args()
    device, planted = "cuda" if torch.cuda.is_available() else "cpu", "nothing" if options.mended else options.planted
    is_tiny = options.planted == "launches"
    width, depth, batch = (64, 60, 32) if is_tiny else (64, 4, 64) if options.small else (4096, 24, 2048)
    torch.manual_seed(0)
    with torch.device(device):
        model = Network(width, depth, is_watched=planted == "numbers")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = Rows(torch.randn(4 * batch, width), torch.randint(0, CLASSES, (4 * batch,)))
    is_pageable = planted == "copies"
    loader = DataLoader(data, batch, pin_memory=device == "cuda" and not is_pageable, collate_fn=list)
    called = torch.compile(model, mode="reduce-overhead") if is_tiny and options.mended else model
    feed = batches(loader, device, is_blocking=is_pageable)
    is_wide = planted == "float32" or is_tiny or options.small

    def step() -> None:
        inputs, labels = next(feed)
        optimizer.zero_grad()
        with contextlib.nullcontext() if is_wide else torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(called(inputs), labels)
        loss.backward()
        optimizer.step()

    print(json.dumps(rate(step, batch, device, skip_s=2.0 if device == "cuda" else 0.1, seconds=options.seconds)))


if __name__ == "__main__":
    main()
