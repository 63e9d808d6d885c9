"""Trains a multilayer perceptron on a table: a plain PyTorch script.

    python tabular.py --num-layers 4 --hidden-size 512 --batch-size 32 --num-workers 4

It needs only torch. The table is synthetic: random features, labelled by a random network, the teacher.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parent))
from recipe_parts import ENDLESS_SAMPLES, SyntheticBatches, add_options, build_loader, cross_entropy, positive, run, train

TEACHER_SEED, TEACHER_SIZE = 1, 64  # the teacher's seed and hidden width; --seed does not change the table


class Table(Dataset[tuple[Tensor, Tensor]]):
    """Rows of features, each labelled by a random network."""

    def __init__(self, num_rows: int, num_features: int, num_classes: int) -> None:
        random = torch.Generator().manual_seed(TEACHER_SEED)
        self.features = torch.randn(num_rows, num_features, generator=random)
        hidden = torch.tanh(self.features @ torch.randn(num_features, TEACHER_SIZE, generator=random))
        self.classes = (hidden @ torch.randn(TEACHER_SIZE, num_classes, generator=random)).argmax(dim=1)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.classes[index]


def build_batches(options: argparse.Namespace, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """Returns an iterable of batches (features of [batch, columns], classes), to be iterated once per epoch."""
    if options.data == "synthetic":
        shape, num_classes = (options.batch_size, options.num_features), options.num_classes
        return SyntheticBatches(
            options, lambda: (torch.randn(shape, device=device), torch.randint(0, num_classes, shape[:1], device=device))
        )
    data = Table(options.samples_per_epoch or ENDLESS_SAMPLES, options.num_features, options.num_classes)
    return build_loader(data, options)


def build_model(options: argparse.Namespace) -> nn.Module:
    """Returns the perceptron with random weights: hidden layers, each followed by ReLU, then one output per class."""
    layers: list[nn.Module] = []
    width = options.num_features
    for _ in range(options.num_layers):
        layers += [nn.Linear(width, options.hidden_size), nn.ReLU()]
        width = options.hidden_size
    return nn.Sequential(*layers, nn.Linear(width, options.num_classes))


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description="Trains a multilayer perceptron on a table.")
    parser.add_argument("--model", choices=("mlp",), default="mlp")
    parser.add_argument("--num-layers", type=positive, default=4, help="hidden layers")
    parser.add_argument("--hidden-size", type=positive, default=512)
    parser.add_argument("--num-classes", type=positive, default=10)
    parser.add_argument("--data", choices=("tabular", "synthetic"), default="tabular")
    parser.add_argument("--num-features", type=positive, default=64, help="columns of the table")
    add_options(parser, lr=1e-3, optimizer="adamw", print_every=100)
    return parser


def main() -> None:
    """Reads the command line and trains."""
    parser = build_parser()
    options = parser.parse_args()

    def start(device: torch.device) -> None:
        batches, model = build_batches(options, device), build_model(options)
        train(options, device, batches, model, cross_entropy, unit="samples", count=lambda batch: len(batch[1]))

    run(parser, options, start)


if __name__ == "__main__":
    main()
