"""Measures the peaks of a device: FLOPs per second of matrix products, and bytes per second of a copy."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Dict, Iterator, Optional

import torch

from .documents import BYTES, WIDE

# Rows of the square matrices that are multiplied: doubled from LEAST_SIDE until a product takes ENOUGH_S, at most to MOST_SIDE.
LEAST_SIDE, MOST_SIDE = 512, 8192
ENOUGH_S = 0.005
COPIED_BYTES = 64 << 20  # more than caches hold
# On a GPU, the host queues about QUEUED_S of work, but at most MOST_QUEUED calls, and only then waits for the device.
QUEUED_S, MOST_QUEUED = 0.001, 50
MEASURED_S, MOST_CALLS = 0.03, 10  # a call (on a GPU, a queue of calls) is repeated for this long, at most this many times
AMPERE = (8, 0)  # first compute capability with bfloat16 Tensor Cores


def peaks(device: str, index: Optional[int] = None) -> Dict[str, float]:
    """Returns the value of `Traced.peaks`; see `TrialContext` for device and index."""
    with untouched(device, index):
        found = {name: _flops_per_s(getattr(torch, name), device) for name in (WIDE, narrow_type(device, index))}
        source = torch.rand(COPIED_BYTES // 4, device=device)
        target = torch.empty_like(source)
        found[BYTES] = 2 * COPIED_BYTES / least_s(lambda: target.copy_(source), device)
    return found


def narrow_type(device: str, index: Optional[int] = None) -> str:
    """Returns the 16-bit type to measure on a device: float16 on GPUs older than Ampere, which only emulate bfloat16."""
    is_old = device == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(index) < AMPERE
    return "float16" if is_old else "bfloat16"


def _flops_per_s(dtype: Any, device: str) -> float:
    side = LEAST_SIDE
    while True:
        matrix = torch.rand(side, side, device=device).to(dtype)
        seconds = least_s(lambda: matrix @ matrix, device)  # noqa: B023 (called at once)
        if seconds >= ENOUGH_S or side >= MOST_SIDE:
            return 2.0 * side**3 / seconds
        side *= 2


def least_s(call: Callable[[], Any], device: str) -> float:
    """Returns the seconds of the fastest of a few calls. A first call, which may choose or compile kernels, does not count.

    On a GPU, many short calls are queued before waiting for the device, since a launch and a wait take as long as such a call.
    """
    _finished_s(call, device)
    num = max(1, min(MOST_QUEUED, round(QUEUED_S / max(_finished_s(call, device), 1e-9)))) if device == "cuda" else 1
    seconds = [_finished_s(call, device, num)]
    while sum(seconds) * num < MEASURED_S and len(seconds) < MOST_CALLS:
        seconds.append(_finished_s(call, device, num))
    return max(min(seconds), 1e-9)


def _finished_s(call: Callable[[], Any], device: str, num: int = 1) -> float:
    begin_s = time.perf_counter()
    for _ in range(num):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin_s) / num


@contextlib.contextmanager
def untouched(device: str, index: Optional[int] = None) -> Iterator[None]:
    """Disables autograd and autocast inside the `with` block, and selects the GPU that trains, if there is one."""
    current: Any = contextlib.nullcontext() if index is None else torch.cuda.device(index)
    with torch.no_grad(), torch.autocast(device, enabled=False), current:
        yield
