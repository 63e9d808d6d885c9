"""Trains a loop of a chosen kind. Short trials tend to measure its long-run rate wrongly. It does not use autotune.

    python truth_program.py --kind loader-4                             # trains forever
    python truth_program.py --kind loader-4 --skip-s 5 --seconds 30     # trains, prints the rate that it measured, and ends

Loaders and steps that sleep stand for a disk and a device. Their queues behave like those of programs that compute, but they do
not drift with the speed of the machine. The first step of every kind takes STALL_S, as if it compiled; meanwhile the workers
fill their queues.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

STALL_S = 1.5  # length of the first step
BATCH, WIDTH = 8, 64
FOREVER = 10**9


@dataclasses.dataclass(frozen=True)
class Kind:
    """One program.

    Attributes:
        workers, prefetch: num_workers and prefetch_factor of the DataLoader.
        batch_s: seconds that a worker sleeps for a batch.
        cv: coefficient of variation of these seconds, which are gamma distributed.
        sorts: number of sorts of 2**15 numbers that a worker computes for a batch, on one thread.
        step_s: seconds that a step sleeps (with accumulation, each micro-batch).
        matmul: width of a real network; 0 for a tiny one.
        layers: number of layers of the network.
        accumulate: number of micro-batches per optimizer step.
        is_iterable: whether the data set is a stream that the workers divide among themselves.
        compiled_at: steps at which the shape changes; each new shape is compiled, and makes all later steps longer.
        growth: what every step adds to the length of the sequence and to `step_s`, as a share of their first values.
    """

    workers: int = 0
    prefetch: int = 2
    batch_s: float = 0.0
    cv: float = 0.0
    sorts: int = 0
    step_s: float = 0.0
    matmul: int = 0
    layers: int = 1
    accumulate: int = 1
    is_iterable: bool = False
    compiled_at: tuple[int, ...] = ()
    growth: float = 0.0

    @property
    def computes(self) -> bool:
        """Returns whether steps compute instead of sleeping."""
        return self.layers > 1

    @property
    def batch(self) -> int:
        """Returns the samples per batch: more for a real network, so that it has enough to compute."""
        return BATCH * 16 if self.matmul else BATCH


KINDS = {
    "loader-1": Kind(workers=1, prefetch=8, batch_s=0.020, step_s=0.012),
    "loader-2": Kind(workers=2, prefetch=4, batch_s=0.044, step_s=0.020),
    "loader-4": Kind(workers=4, prefetch=4, batch_s=0.100, step_s=0.011),
    "loader-4-close": Kind(workers=4, prefetch=4, batch_s=0.082, step_s=0.020),  # the queue drains for 600 steps
    "bursty": Kind(workers=4, prefetch=2, batch_s=0.024, cv=0.5, step_s=0.003),
    "shared-1": Kind(workers=1, prefetch=4, sorts=12, matmul=384, layers=6),
    "shared-2": Kind(workers=2, prefetch=8, sorts=24, matmul=384, layers=6),
    "device": Kind(workers=2, batch_s=0.010, step_s=0.020),
    "device-cpu": Kind(matmul=384, layers=8),
    "launch": Kind(layers=150),
    "recompiles": Kind(step_s=0.020, compiled_at=(30, 60, 120)),
    "accumulation": Kind(workers=2, prefetch=8, batch_s=0.014, step_s=0.005, accumulate=4),
    "iterable": Kind(workers=2, prefetch=4, batch_s=0.030, step_s=0.010, is_iterable=True),
    "slow": Kind(workers=2, prefetch=1, batch_s=2.6, step_s=1.05),
    "growing": Kind(step_s=0.015, growth=0.004),
}


class Data(Dataset[int]):
    """Returns each index as the sample; the collate function does the work of a batch."""

    def __len__(self) -> int:
        return FOREVER

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Stream(IterableDataset[int]):
    """Yields the indices of `Data` as a stream, which the workers divide among themselves."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(start, FOREVER, step))


class Collate:
    """Makes a batch: sleeps, computes, or does both."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __call__(self, indices: list[int]) -> torch.Tensor:
        kind = self.kind
        chance = np.random.default_rng(indices[0])
        if kind.batch_s:
            time.sleep(chance.gamma(1 / kind.cv**2, kind.batch_s * kind.cv**2) if kind.cv else kind.batch_s)
        for _ in range(kind.sorts):
            np.sort(chance.random(2**15))
        return torch.randn(kind.batch, kind.matmul or WIDTH)


class Slowly:
    """A slow compiler: compiled code is the original code."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        time.sleep(1.0)
        return graph.forward


class Loop:
    """A network, its optimizer and its data."""

    def __init__(self, kind: Kind, *, is_free: bool) -> None:
        torch.manual_seed(0)
        if not kind.matmul:
            torch.set_num_threads(1)  # without work, further threads would only spin
        self.kind = kind
        width = kind.matmul or WIDTH
        layers = [layer for _ in range(kind.layers) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model: Any = nn.Sequential(*layers, nn.Linear(width, 1))
        if kind.compiled_at:
            self.model = torch.compile(self.model, backend=Slowly(), dynamic=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.batches = self._cached() if is_free else self._loaded()
        self.num_steps = 0

    def _cached(self) -> Iterator[torch.Tensor]:
        batch = Collate(dataclasses.replace(self.kind, batch_s=0.0, sorts=0))([0])
        while True:
            yield batch

    def _loaded(self) -> Iterator[torch.Tensor]:
        kind = self.kind
        prefetch = kind.prefetch if kind.workers else None
        data: Any = Stream() if kind.is_iterable else Data()
        return iter(
            DataLoader(
                data, batch_size=kind.batch, num_workers=kind.workers, prefetch_factor=prefetch, collate_fn=Collate(kind)
            )
        )

    def step(self) -> int:
        """Makes one optimizer step and returns how many samples it had."""
        samples = 0
        for _ in range(self.kind.accumulate):
            batch = next(self.batches)
            samples += len(batch)
            self.model(self._shaped(batch)).square().mean().backward()
            self._device()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.num_steps == 0:
            time.sleep(STALL_S)
        self.num_steps += 1
        return samples

    def _shaped(self, batch: torch.Tensor) -> torch.Tensor:
        kind = self.kind
        if kind.compiled_at:
            return batch.unsqueeze(1).expand(-1, 2 + self._num_shapes(), -1)
        if kind.growth:
            length = 4 * (1 + kind.growth * self.num_steps)
            return batch.unsqueeze(1).expand(-1, int(length), -1)
        return batch

    def _num_shapes(self) -> int:
        return sum(self.num_steps >= at for at in self.kind.compiled_at)

    def _device(self) -> None:
        if self.kind.step_s:
            time.sleep(self.kind.step_s * (1 + self._num_shapes() / 4 + self.kind.growth * self.num_steps))


def main() -> None:
    """Trains forever, or for the given time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--skip-s", type=float, default=0.0, help="seconds of training before the measurement")
    parser.add_argument("--seconds", type=float, help="length of the measurement; default: train forever")
    parser.add_argument("--free-loader", action="store_true", help="use one fixed batch instead of a loader")
    options = parser.parse_args()
    loop = Loop(KINDS[options.kind], is_free=options.free_loader)
    loop.step()
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < options.skip_s:
        loop.step()
    started_s, first, samples = time.monotonic(), loop.num_steps, 0
    until_s = started_s + (float("inf") if options.seconds is None else options.seconds)
    while time.monotonic() < until_s:
        samples += loop.step()
    seconds = time.monotonic() - started_s
    print(json.dumps({"rate_per_s": samples / seconds, "steps": loop.num_steps - first, "seconds": seconds}))


if __name__ == "__main__":
    main()
