"""Contains the code that the training scripts of this folder share: plain PyTorch, for one process or several."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

ENDLESS_SAMPLES = 100_000  # default samples in an epoch of built-in data, which have no end: as many as in a usual epoch
SYNTHETIC_BATCHES = 4


class SyntheticBatches:
    """Random batches that are already on the device: training without an input pipeline.

    Args:
        options: the command line.
        make: returns a batch. The batches are random and differ, because some kernels run faster with constant inputs than with
            real data.
    """

    def __init__(self, options: argparse.Namespace, make: Callable[[], Any]) -> None:
        self.num_steps = max(1, (options.samples_per_epoch or ENDLESS_SAMPLES) // options.batch_size)
        self.batches = [make() for _ in range(SYNTHETIC_BATCHES)]

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[step % len(self.batches)] for step in range(self.num_steps))


def build_loader(data: Dataset[Any], options: argparse.Namespace) -> DataLoader[Any]:
    """Returns a loader that shuffles and gives each process its part of the data; a stream is loaded as it is."""
    is_stream = isinstance(data, IterableDataset)
    sampler: Any = DistributedSampler(data, seed=options.seed) if dist.is_initialized() and not is_stream else None
    shuffle = sampler is None and not is_stream
    return DataLoader(data, options.batch_size, shuffle=shuffle, sampler=sampler, num_workers=options.num_workers)


def build_optimizer(name: str, model: nn.Module, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Returns the optimizer over all parameters of the model; `weight_decay` is used only by "sgd"."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)
    return torch.optim.AdamW(model.parameters(), lr=lr)


# Support for training in several processes, each with its part of the data. A launcher such as torchrun starts the processes.
# Without a launcher, these functions have no effect.


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
    """Returns the model; with several processes, wrapped in DistributedDataParallel or, for "fsdp", sharded across them."""
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
    """Yields the items of each outermost nn.Sequential or nn.ModuleList in the model, such as a transformer's layers.

    Skips items without parameters. If an item is itself an nn.ModuleList, its items are yielded in its place.
    """
    is_list = isinstance(model, (nn.Sequential, nn.ModuleList))
    for child in model.children():
        if not is_list or type(child).forward is nn.Module.forward:  # without a `forward`: a nested nn.ModuleList
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def begin_epoch(batches: Any, epoch: int) -> None:
    """Makes the sampler of several processes, if there is one, draw a new order for an epoch."""
    if isinstance(sampler := getattr(batches, "sampler", None), DistributedSampler):
        sampler.set_epoch(epoch)


def is_first() -> bool:
    """Whether this is the only process, or the first of several."""
    return not dist.is_initialized() or dist.get_rank() == 0


# Training.


def moved(batch: Any, device: torch.device) -> Any:
    """Returns the batch with all its tensors moved to the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: moved(item, device) for name, item in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [moved(item, device) for item in batch]
    return batch


def train(
    options: argparse.Namespace,
    device: torch.device,
    batches: Iterable[Any],
    model: nn.Module,
    step: Callable[[nn.Module, Any], Tensor],
    *,
    unit: str = "steps",
    count: Callable[[Any], int] = lambda batch: 1,
    weight_decay: float = 0.0,
) -> None:
    """Trains for all epochs, printing this process's loss and rate every few steps.

    Args:
        options: the command line.
        device: where the model is moved and trained.
        batches: iterated once per epoch.
        model: the model.
        step: returns the loss of a batch that is already on the device.
        unit: what the printed rate counts.
        count: returns the number of such units in a batch.
        weight_decay: see `build_optimizer`.
    """
    model = in_step(model.to(device), device, options.strategy)
    optimizer = build_optimizer(options.optimizer, model, options.lr, weight_decay)
    model.train()
    for epoch in range(options.epochs):
        begin_epoch(batches, epoch)
        since_s, num_units = time.monotonic(), 0
        for number, batch in enumerate(batches, start=1):
            batch = moved(batch, device)
            loss = step(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            num_units += count(batch)
            if number % options.print_every == 0 and is_first():
                value = loss.item()  # waits for the device; so it is called only now, and before the clock is read
                rate_per_s = num_units / (time.monotonic() - since_s)
                print(f"epoch {epoch} step {number} loss {value:.4f} {unit}/s {rate_per_s:.1f}", flush=True)
                since_s, num_units = time.monotonic(), 0


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Returns the cross-entropy of a batch (inputs, class indices)."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


# The command line.


def positive(text: str) -> int:
    """Returns the positive integer in `text`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def add_options(parser: argparse.ArgumentParser, *, lr: float, optimizer: str, print_every: int = 10) -> None:
    """Adds the options that all scripts have, with these defaults."""
    parser.add_argument("--batch-size", type=positive, default=32)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--samples-per-epoch", type=positive, help="default: 100,000, or all images of a folder")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default=optimizer)
    strategy_help = "with several processes, each holds a replica (ddp) or a shard (fsdp) of the model"
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help=strategy_help)
    parser.add_argument("--print-every", type=positive, default=print_every, help="steps between two printed lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace, start: Callable[[torch.device], None]) -> None:
    """Joins the other processes, if there are any, and calls `start` with the device.

    If `--device` is cuda and torch sees no CUDA device, ends the program with an error message.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: torch sees no CUDA device, got cuda. Use auto or cpu")
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = join_processes(name)
    # Each process has its own seed. `in_step` then gives all processes the weights of rank 0.
    torch.manual_seed(options.seed + (dist.get_rank() if dist.is_initialized() else 0))
    start(device)
    if dist.is_initialized():
        dist.destroy_process_group()
