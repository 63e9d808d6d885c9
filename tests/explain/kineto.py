"""Writes traces in Kineto's format (pytorch/kineto, libkineto/src/output_json.cpp), like those of a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from autotune.explain.breakdown import Breakdown, breakdown
from autotune.explain.host import host_of
from autotune.explain.trace import Trace, read_trace

PROCESS, MAIN, AUTOGRAD = 100, 100, 101
GEMM = "ampere_sgemm_128x64_nn"
GEMM_16 = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Kineto:
    """Collects events of a trace. All times are milliseconds."""

    def __init__(self, device: str = "NVIDIA A100-SXM4-80GB") -> None:
        self.document: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": device, "computeMajor": 8, "numSms": 108}] if device else [],
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
            "displayTimeUnit": "ms",
            "traceEvents": [],
        }
        self.events: list[Any] = self.document["traceEvents"]
        self._correlation = 0

    def add(self, category: str, name: str, start: float, length: float, *, thread: int = MAIN, **arguments: Any) -> None:
        """Adds a complete event of the host."""
        self._add(category, name, start, length, PROCESS, thread, arguments)

    def step(self, number: int, start: float, length: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start, length)

    def phase(self, name: str, start: float, length: float) -> None:
        self.add("user_annotation", f"autotune::{name}", start, length)

    def operator(self, name: str, start: float, length: float, dims: Any = (), types: Any = (), **more: Any) -> None:
        thread = more.pop("thread", MAIN)
        shapes = {"Input Dims": list(dims), "Input type": list(types)}
        self._add("cpu_op", name, start, length, PROCESS, thread, {**shapes, **more})

    def kernel(self, name: str, start: float, length: float, *, launched: float | None = None, **more: Any) -> None:
        """Adds a kernel or copy (by default on stream 7). If `launched` is given, also adds its launch of 5 us at that time."""
        self._correlation += 1
        stream, category = more.pop("stream", 7), more.pop("category", "kernel")
        launch = {
            "device": 0, "stream": stream, "correlation": self._correlation,
            "registers per thread": 32, "shared memory": 1024,
            "grid": [108, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 50,
        }  # fmt: skip
        if category != "kernel":
            launch = {"device": 0, "stream": stream, "correlation": self._correlation, "bytes": 4096}
        self._add(category, name, start, length, 0, stream, {**launch, **more})
        if launched is not None:
            self.add("cuda_runtime", "cudaLaunchKernel", launched, 0.005, cbid=211, correlation=self._correlation)

    def copy(self, name: str, start: float, length: float) -> None:
        self.kernel(name, start, length, category="gpu_memcpy")

    def _add(self, category: str, name: str, start: float, length: float, pid: Any, tid: Any, arguments: Any) -> None:
        times = {"ts": 1e9 + 1e3 * start, "dur": 1e3 * length}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": arguments})

    def write(self, path: Path) -> Path:
        """Writes the trace, compressed if the name ends in .gz."""
        text = json.dumps(self.document).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    def trace(self, folder: Path) -> Trace:
        return read_trace(self.write(folder / "trace.json.gz"))

    def breakdown(self, folder: Path) -> Breakdown:
        trace = self.trace(folder)
        return breakdown(trace, host_of(trace))


def milliseconds(found: Breakdown) -> dict[str, float]:
    """Returns the categories that are not zero, in milliseconds per step."""
    return {name: round(1e3 * value, 6) for name, value in found.seconds.items() if value > 1e-9}


def sums_to_its_steps(found: Breakdown, trace: Trace) -> bool:
    """Returns whether the categories of each step sum to the step and none is negative."""
    steps = trace.steps()
    return bool(np.allclose(found.by_step.sum(axis=1), steps[:, 1] - steps[:, 0], rtol=1e-6)) and bool(
        (found.by_step > -1e-9).all()
    )
