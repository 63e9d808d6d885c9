"""Trains a small convolutional network on images that its loader augments. It does not use autotune.

python apply_program.py                                        # trains forever
python apply_program.py --skip-s 4 --seconds 20                # trains, prints the rate that it measured, and ends
python apply_program.py ... --batch 32 --workers 1 --bf16 --channels-last    # the same settings, written by hand
"""

import argparse
import contextlib
import itertools
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE, SAMPLES, EPOCHS = 64, 1024, 10**6


class Images(Dataset):
    """Random images, flipped and scaled as an augmentation would."""

    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (SAMPLES, 3, SIZE, SIZE), dtype=torch.uint8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index].float().div_(255.0).sub_(0.5)
        return (image.flip(-1) if index % 2 else image), index % 10


def make_model() -> nn.Module:
    """Returns four convolutions and a linear layer."""
    widths = (3, 32, 64, 128, 128)
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def main() -> None:
    """Trains until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip-s", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model()
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Images(), options.batch, shuffle=True, num_workers=options.workers)
    begun_s, since_s, num_samples = time.monotonic(), 0.0, 0
    for _ in range(EPOCHS):
        for x, y in loader:
            if options.channels_last:
                x = x.to(memory_format=torch.channels_last)
            with torch.autocast("cpu", dtype=torch.bfloat16) if options.bf16 else contextlib.nullcontext():
                out = model(x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(out.float(), y).backward()
            optimizer.step()
            now_s = time.monotonic()
            num_samples += len(y)
            if not since_s and now_s - begun_s >= options.skip_s:
                since_s, num_samples = now_s, 0
            if since_s and now_s - since_s >= options.seconds:
                print(json.dumps({"rate_per_s": num_samples / (now_s - since_s)}))
                return


if __name__ == "__main__":
    main()
