"""Sets knobs of the whole process: thread counts, matrix-product precision, cuDNN's choice of algorithm, environment.

They are set right after torch is imported and again as training begins. Values that a program sets at start-up are thus
replaced. A program that sets its own values again later is reported as overriding the knobs.
"""

from __future__ import annotations

import os
from typing import Any, Dict

import torch

from ..patches import patches
from ..protocol import NOT_APPLICABLE, KnobReport, whole_number
from . import affinity
from .base import ON_THE_CPU, KnobHandler, compared

INTRA, OMP, MATMUL, CUDNN = "threads.intra", "threads.omp", "precision.matmul", "backend.cudnn_benchmark"
SHARING, INTEROP, MKL = "loader.sharing_strategy", "threads.interop", "threads.mkl"
READ_BACK = (INTRA, INTEROP, OMP, MKL, MATMUL, CUDNN, SHARING)
NO_MKL = "torch was built without MKL"
NO_CONVOLUTIONS = "none of the modules that the program calls has a convolution"
IN_16_BITS = "the parameters are {} already, so no products are computed in float32"


class ProcessKnobs(KnobHandler):
    """Sets knobs of the whole process; environment variables were already set before the interpreter started."""

    @property
    def asked(self) -> Dict[str, Any]:
        """Knob key -> value, for this family and all environment variables."""
        return {key: value for key, value in self._context.spec.knobs.items() if key in READ_BACK or key.startswith("env.")}

    def on_torch(self) -> None:
        """Sets the trial's knobs."""
        knobs = self._context.spec.knobs
        if INTRA in knobs and torch.get_num_threads() != knobs[INTRA]:
            torch.set_num_threads(int(knobs[INTRA]))
        if knobs.get(affinity.AFFINITY, affinity.NONE) != affinity.NONE:
            follow_cores(knobs)  # with `autotune.apply`, torch may have been imported before the cores were bound
        if MATMUL in knobs:
            torch.set_float32_matmul_precision(knobs[MATMUL])
        if CUDNN in knobs:
            torch.backends.cudnn.benchmark = bool(knobs[CUDNN])
        if INTEROP in knobs:
            _set_interop(int(knobs[INTEROP]))
        share(knobs)

    on_activate = on_torch  # again: the program may have set its own values at start-up

    def observe(self) -> Dict[str, Any]:
        """Returns knob key -> value in force in this process."""
        found: Dict[str, Any] = {
            INTRA: torch.get_num_threads(),
            INTEROP: torch.get_num_interop_threads(),
            MATMUL: matmul_precision(self._context.device),
            CUDNN: bool(torch.backends.cudnn.benchmark),
            SHARING: torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        }
        for key, name in ((OMP, "OMP_NUM_THREADS"), (MKL, "MKL_NUM_THREADS")):
            if (threads := whole_number(os.environ.get(name, ""))) is not None:
                found[key] = threads
        return found

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be changed in this process."""
        reasons = {} if has_mkl() else {MKL: NO_MKL}
        if self._context.device == "cuda":
            return {**reasons, **self._without_effect()}
        return {**reasons, CUDNN: f"{ON_THE_CPU}: cuDNN is not used"}

    def _without_effect(self) -> Dict[str, str]:
        """Returns knob key -> why it changes nothing on the GPU in this program."""
        modules = self._context.modules
        reasons: Dict[str, str] = {}
        # A compiled function that calls the training roots may also call frozen modules, which the harness does not see then.
        if modules.convolutions.is_found is False and not modules.functions.call_all_roots:
            reasons[CUDNN] = NO_CONVOLUTIONS
        dtypes = {dtype for root in modules.reported for dtype in root.observed["parameter_dtypes"]}
        if dtypes and dtypes <= {"bf16", "fp16"}:
            reasons[MATMUL] = IN_16_BITS.format(" and ".join(sorted(dtypes)))
        return reasons

    def _verify(self, key: str, asked: Any) -> KnobReport:
        if key == MKL and not has_mkl():
            return KnobReport(NOT_APPLICABLE, NO_MKL)
        if not key.startswith("env."):
            return super()._verify(key, asked)
        return compared(os.environ.get(key[4:]), asked)


def matmul_precision(device: str) -> str:
    """Returns the value of precision.matmul in force, even if the program has set it by the API that torch 2.9 added.

    If the program has used that API, torch's own `get_float32_matmul_precision` may raise, or return an earlier value.
    """
    try:
        known = torch.get_float32_matmul_precision()
    except RuntimeError:
        known = "highest"
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    now = getattr(getattr(backend, "matmul", None), "fp32_precision", "none")  # torch before 2.9 has no such setting
    if now == "none" or (now, known) == ("tf32", "medium"):  # cuBLAS computes in tf32 also for "medium"
        return known
    return {"tf32": "high", "bf16": "medium"}.get(now, "highest")


def _set_interop(num_threads: int) -> None:
    # The number can be set only once. A later call by the program would raise, so such a call is made to do nothing.
    if hasattr(torch.set_num_interop_threads, "__wrapped__"):
        return
    try:
        torch.set_num_interop_threads(num_threads)
    except RuntimeError:  # the threads already exist; reading the value back reports it
        return
    patches.install(torch, "set_num_interop_threads", lambda _: lambda num_threads: None)


def follow_cores(knobs: Dict[str, Any]) -> None:
    """Lowers torch's intra-op threads to the number of this process's cores, unless a knob sets their number."""
    num_cores = len(os.sched_getaffinity(0))
    if not {INTRA, OMP, MKL} & set(knobs) and torch.get_num_threads() > num_cores:
        torch.set_num_threads(num_cores)


def share(knobs: Dict[str, Any]) -> None:
    """Sets how tensors are shared between processes, if the trial has that knob and torch supports it; workers inherit it."""
    if SHARING not in knobs:
        return
    if knobs[SHARING] in torch.multiprocessing.get_all_sharing_strategies():  # type: ignore[no-untyped-call]
        torch.multiprocessing.set_sharing_strategy(knobs[SHARING])  # type: ignore[no-untyped-call]


def has_mkl() -> bool:
    """Returns whether this torch computes with MKL, which reads MKL_NUM_THREADS."""
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
