"""Writes documents of the passes like the harness does, for tests of the tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from autotune.harness.explain.documents import Line, Lines, Memory, Site, Stage, Traced, document_file, trace_file
from tests.explain.kineto import Kineto


def lines(rank: int = 0, world_size: int = 1, **changes: Any) -> Lines:
    made = Lines(
        rank=rank, world_size=world_size, device="cpu", steps=10, seconds=1.0, samples=160.0, unit="samples",
        phases_s={"input": 0.02, "transfer": 0.0, "forward": 0.03, "backward": 0.04, "optimizer": 0.005, "other": 0.005},
        device_phases_s=None, wait_s=0.02, num_workers=1, batch_size=16, num_samples=500,
        lines=[Line("/p/train.py", 12, "main", "log(loss)", "other", "main", True, 0.004, 0.004, "logging.py:emit")],
        stages=[
            Stage("decode", "worker", 0.004, 0.003, 0.001, 100, "/p/data.py", 7, "Images.__getitem__"),
            Stage("collate", "worker", 0.001, None, 0.0, 10),
        ],
        syncs=[Site("item", "/p/train.py", 13, "main", "loss.item()", "other", 2.0, 0.001)], gc_s=0.0, gc_count=0.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def traced(rank: int = 0, world_size: int = 1, **changes: Any) -> Traced:
    made = Traced(
        rank=rank, world_size=world_size, device="cpu", file=trace_file(rank), steps=1, step_s=0.1, plain_step_s=0.1,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def memory(rank: int = 0, world_size: int = 1, **changes: Any) -> Memory:
    made = Memory(
        rank=rank, world_size=world_size, device="cpu", peak_bytes=1000, parameters=100, gradients=100,
        optimizer_state=200, activations=550, input=50, other=0,
        by_module=[{"module": "layer1", "class": "Linear", "activations": 500, "parameters": 60, "flops": 4e9}],
        flops=6e9, samples=16.0, unit="samples",
        capacity_bytes=4000,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def write(folder: Path, *documents: Lines | Traced | Memory) -> Path:
    """Writes documents into a folder, and returns it."""
    names = {Lines: "lines", Traced: "trace", Memory: "memory"}
    for document in documents:
        path = folder / document_file(names[type(document)], document.rank)
        path.write_text(json.dumps(dataclasses.asdict(document)))
    return folder


def step_of_the_cpu(folder: Path, rank: int = 0) -> None:
    """Writes a rank's trace of one step of 100 ms."""
    made = Kineto(device="")
    made.step(1, 0, 100)
    made.phase("forward", 0, 60)
    made.operator("aten::mm", 10, 40, [[512, 512], [512, 512]], ["float", "float"])
    made.phase("backward", 60, 20)
    made.write(folder / trace_file(rank))
