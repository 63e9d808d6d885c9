"""Knobs of the whole process: thread counts, matrix-product precision, cuDNN's choice of algorithm, environment.

Set right after torch is imported, and again as training begins: a program that sets its own at start-up is tuned over, one
that keeps setting them is reported as overriding.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict

from ..protocol import APPLIED, HIDDEN_VARIABLE, OVERRIDDEN, STAND_IN, KnobReport

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
        if key.startswith("env.") and str(value).startswith(STAND_IN):
            reports[key] = _verify_hidden(key[4:], value)
            continue
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


def _verify_hidden(name: str, stand_in: str) -> KnobReport:
    # The value is a secret: neither the spec nor the result may hold it, so its digest travels in the environment.
    asked = json.loads(os.environ.get(HIDDEN_VARIABLE, "{}")).get(name)
    value = os.environ.get(name, "")
    if hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest() == asked:
        return KnobReport(APPLIED, "", stand_in)
    return KnobReport(OVERRIDDEN, "the process has another value than was asked")


def applicability(device: str) -> Dict[str, str]:
    """Returns knob key -> why it cannot be turned in this process."""
    if device == "cuda":
        return {}
    return {CUDNN: "the program trains on the CPU: cuDNN is not used"}
