"""Knobs of the whole process: thread counts, matrix-product precision, cuDNN's choice of algorithm, environment.

Set right after torch is imported, and again as training begins: a program that sets its own at start-up is tuned over, one
that keeps setting them is reported as overriding.
"""

from __future__ import annotations

import os
from typing import Any, Dict

from ..protocol import APPLIED, OVERRIDDEN, KnobReport

INTRA, OMP, MATMUL, CUDNN = "threads.intra", "threads.omp", "precision.matmul", "backend.cudnn_benchmark"


def observe() -> Dict[str, Any]:
    """Returns knob key -> value in force in this process."""
    import torch

    found: Dict[str, Any] = {
        INTRA: torch.get_num_threads(),
        MATMUL: torch.get_float32_matmul_precision(),
        CUDNN: bool(torch.backends.cudnn.benchmark),
    }
    omp = os.environ.get("OMP_NUM_THREADS", "")
    if omp.isdigit():
        found[OMP] = int(omp)
    return found


def apply(knobs: Dict[str, Any]) -> None:
    """Sets the knobs of this family; environment knobs were set before the interpreter started."""
    import torch

    if INTRA in knobs and torch.get_num_threads() != knobs[INTRA]:
        torch.set_num_threads(int(knobs[INTRA]))
    if MATMUL in knobs:
        torch.set_float32_matmul_precision(knobs[MATMUL])
    if CUDNN in knobs:
        torch.backends.cudnn.benchmark = bool(knobs[CUDNN])


def verify(knobs: Dict[str, Any]) -> Dict[str, KnobReport]:
    """Returns a report for every knob of this family, read back from the process."""
    found = observe()
    reports = {}
    for key, value in knobs.items():
        if key.startswith("env."):
            observed: Any = os.environ.get(key[4:])
        elif key in (INTRA, OMP, MATMUL, CUDNN):
            observed = found.get(key)
        else:
            continue
        if str(observed) == str(value):
            reports[key] = KnobReport(APPLIED, "", observed)
        else:
            reports[key] = KnobReport(OVERRIDDEN, f"the process has {observed!r}, {value!r} was asked", observed)
    return reports


def applicability(device: str) -> Dict[str, str]:
    """Returns knob key -> why it cannot be turned in this process."""
    if device == "cuda":
        return {}
    return {CUDNN: "the program trains on the CPU: cuDNN is not used"}
