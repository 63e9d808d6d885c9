"""Trains a multilayer perceptron on a table: a plain PyTorch script.

    python tabular.py --num-layers 4 --hidden-size 512 --batch-size 32 --num-workers 4

It needs only torch. The table is synthetic: random features, labelled by a random network, the teacher.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ENDLESS_SAMPLES = 100_000  # default number of rows of the table
SYNTHETIC_BATCHES = 4
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


class SyntheticBatches:
    """Random batches that are already on the device: training without an input pipeline."""

    def __init__(self, num_steps: int, shape: tuple[int, int], num_classes: int, device: torch.device) -> None:
        self.num_steps = num_steps
        self.batches = [
            (torch.randn(shape, device=device), torch.randint(0, num_classes, shape[:1], device=device))
            for _ in range(SYNTHETIC_BATCHES)
        ]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batches[step % len(self.batches)] for step in range(self.num_steps))


def build_batches(options: argparse.Namespace, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """Returns an iterable of batches (features of [batch, columns], classes), to be iterated once per epoch."""
    num_samples = options.samples_per_epoch or ENDLESS_SAMPLES
    if options.data == "synthetic":
        shape = (options.batch_size, options.num_features)
        return SyntheticBatches(max(1, num_samples // options.batch_size), shape, options.num_classes, device)
    data = Table(num_samples, options.num_features, options.num_classes)
    sampler: Any = DistributedSampler(data) if dist.is_initialized() else None
    return DataLoader(data, options.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=options.num_workers)


def build_model(options: argparse.Namespace) -> nn.Module:
    """Returns the perceptron with random weights: hidden layers, each followed by ReLU, then one output per class."""
    layers: list[nn.Module] = []
    width = options.num_features
    for _ in range(options.num_layers):
        layers += [nn.Linear(width, options.hidden_size), nn.ReLU()]
        width = options.hidden_size
    return nn.Sequential(*layers, nn.Linear(width, options.num_classes))


def build_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Returns the optimizer over all parameters of the model."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def join_processes(kind: str) -> torch.device:
    """Returns this process's device, such as "cuda:1"; joins the process group if a launcher started several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return torch.device(kind)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return device


def in_step(model: nn.Module, device: torch.device, strategy: str = "ddp") -> nn.Module:
    """Returns the model. With several processes, it is wrapped to average gradients over them, or sharded across them."""
    if not dist.is_initialized():
        return model
    if strategy == "fsdp":
        return shared_out(model, device)
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def shared_out(model: nn.Module, device: torch.device) -> nn.Module:
    """Returns the model with the parameters of rank 0, sharded across the processes and gathered block by block."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch before 2.6
        from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]

    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, 0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the items of the outermost nn.Sequential and nn.ModuleList, such as a transformer's layers.

    Skips items without parameters. If an item is itself an nn.ModuleList, its items are yielded in its place.
    """
    is_list = isinstance(model, (nn.Sequential, nn.ModuleList))
    for child in model.children():
        if not is_list or type(child).forward is nn.Module.forward:  # a nested list, which is never called itself
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def begin_epoch(batches: Any, epoch: int) -> None:
    """Reshuffles the data across the processes for an epoch."""
    if isinstance(sampler := getattr(batches, "sampler", None), DistributedSampler):
        sampler.set_epoch(epoch)


def is_first() -> bool:
    """Whether this is the only process, or the first of several."""
    return not dist.is_initialized() or dist.get_rank() == 0


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Trains for all epochs, printing loss and rate every few steps."""
    batches = build_batches(options, device)
    model = in_step(build_model(options).to(device), device, options.strategy)
    optimizer = build_optimizer(options.optimizer, model, options.lr)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for epoch in range(options.epochs):
        begin_epoch(batches, epoch)
        since_s, num_samples = time.monotonic(), 0
        for step, (features, classes) in enumerate(batches, start=1):
            features = features.to(device, non_blocking=True)
            classes = classes.to(device, non_blocking=True)
            loss = criterion(model(features), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_samples += len(classes)
            if step % options.print_every == 0 and is_first():
                value = loss.item()  # waits for the device, so it is called rarely, and before the clock is read
                rate_per_s = num_samples / (time.monotonic() - since_s)
                print(f"epoch {epoch} step {step} loss {value:.4f} samples/s {rate_per_s:.1f}", flush=True)
                since_s, num_samples = time.monotonic(), 0


def positive(text: str) -> int:
    """Returns the positive integer in `text`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description="Trains a multilayer perceptron on a table.")
    parser.add_argument("--model", choices=("mlp",), default="mlp")
    parser.add_argument("--num-layers", type=positive, default=4, help="hidden layers")
    parser.add_argument("--hidden-size", type=positive, default=512)
    parser.add_argument("--num-classes", type=positive, default=10)
    parser.add_argument("--data", choices=("tabular", "synthetic"), default="tabular")
    parser.add_argument("--num-features", type=positive, default=64, help="columns of the table")
    parser.add_argument("--batch-size", type=positive, default=32)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--samples-per-epoch", type=positive, help="rows of the table; default: 100,000")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    strategy_help = "with several processes, each holds a replica (ddp) or a shard (fsdp) of the model"
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help=strategy_help)
    parser.add_argument("--print-every", type=positive, default=100, help="steps between two printed lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    return parser


def main() -> None:
    """Reads the command line and trains."""
    parser = build_parser()
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: torch sees no CUDA device, got cuda. Use auto or cpu")
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = join_processes(name)
    # Each process has its own seed. `in_step` then gives all processes the weights of rank 0.
    torch.manual_seed(options.seed + (dist.get_rank() if dist.is_initialized() else 0))
    train(options, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
