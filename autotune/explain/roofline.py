"""Compares FLOPs and bytes per second with a device's peaks.

The roofline model is by Williams et al., 2009. MFU (model FLOPs utilisation) is by Chowdhery et al., 2022: the model's FLOPs
divided by the FLOPs that the device could have done in the same time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.explain.kernel_names import BITS_16, BITS_32, NO, UNKNOWN, YES
from autotune.explain.table import Row, quotient
from autotune.harness.explain.documents import BYTES, NARROW

T = 1e12
G = 1e9
TF32, WIDE = "tf32", "float32"
MATRIX_KINDS = ("matmul", "convolution", "attention")  # kinds of operators that do matrix work
HOST_BOUND, MIN_BUSY_FRAC = "host", 0.5  # if the device is busy for a smaller share of a step, the bound is the host
# A kernel of a matrix product is doubtful if its name does not show whether it runs on Tensor Cores. Kernels of 16-bit products
# never count as doubtful. If doubtful kernels take a larger share of the time than this, the share on Tensor Cores is unknown.
MAX_DOUBTFUL_FRAC = 0.1

COLUMNS = {
    "rank": "rank of the process", "device": "name of the device",
    "step_s": "seconds of a step, without a profiler if possible",
    "dtype": "dtype of most of the matrix work; tf32 if most products of float32 round to it", "flops": "FLOPs of a step",
    "flops_from": "source of flops: memory (the memory pass counted them) or trace (computed from the shapes in a trace)",
    "bytes": "minimum bytes of a step, in operators whose traffic is known", "flops_per_s": "FLOPs per second",
    "bytes_per_s": "bytes per second", "peak_flops_per_s": "peak of the device in this dtype",
    "peak_bytes_per_s": "peak of the device's memory", "peak_source": "data sheet, or measured",
    "mfu_frac": "flops_per_s relative to the peak (MFU)", "bandwidth_frac": "bytes_per_s relative to the peak",
    "intensity_flops_per_byte": "FLOPs per byte", "ridge_flops_per_byte": "intensity above which compute is the bound",
    "bound": "what bounds the step: host if the device is idle for most of it, else compute or memory, by the device's peaks",
    "roofline_frac": "minimum seconds that the peaks allow, divided by the step's seconds",
    "busy_frac": "share of the step in which the device computes, communicates or copies",
    "tensor_core_frac": "share of the kernels' seconds on Tensor Cores; includes kernels of 16-bit products with unclear names",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The peaks of a device.

    Attributes:
        flops_per_s: dtype ("float32", "tf32", "bfloat16", "float16", "float8") -> dense FLOPs per second.
        bytes_per_s: bandwidth of its memory; None if unknown.
        source: the data sheet with these numbers, or "measured".
    """

    flops_per_s: Mapping[str, float]
    bytes_per_s: float | None
    source: str

    def of(self, dtype: str | None) -> float | None:
        """Returns the peak of a dtype; None if unknown. If the peak of "tf32" is unknown, returns the peak of "float32"."""
        found = self.flops_per_s.get(dtype or "")
        return self.flops_per_s.get(WIDE) if found is None and dtype == TF32 else found


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The time that a piece of work would take at the device's peaks.

    Attributes:
        bound: "compute" or "memory", whichever alone would take longer; "" if neither is known, or if the work has FLOPs but
            the peak of their dtype is unknown.
        least_s: seconds that the work would take at the known peaks; None if unknown.
    """

    bound: str = ""
    least_s: float | None = None


def roof(flops: float | None, num_bytes: float | None, peak_flops_per_s: float | None, peaks: Peaks | None) -> Roof:
    """Returns the roof of a piece of work.

    Args:
        flops: FLOPs of the work; None if unknown.
        num_bytes: bytes that the work moves; None if unknown.
        peak_flops_per_s: the device's peak in the dtype of the work; None if unknown.
        peaks: peaks of the device; None if unknown.
    """
    computing = flops / peak_flops_per_s if flops is not None and peak_flops_per_s else 0.0
    moving = num_bytes / peaks.bytes_per_s if num_bytes is not None and peaks and peaks.bytes_per_s else 0.0
    if not computing and not moving:
        return Roof()
    bound = "" if flops and not computing else "compute" if computing >= moving else "memory"
    return Roof(bound=bound, least_s=max(computing, moving))


@dataclass(frozen=True, kw_only=True)
class Step:
    """The measured properties of a step.

    Attributes:
        seconds: its duration without a profiler.
        flops, flops_from: its FLOPs (None if unknown) and their source.
        num_bytes: least bytes that it moves; None if unknown.
        busy_s: seconds in which the device works; None on the CPU.
        operators, kernels: rows of these tables; no kernels on the CPU.
    """

    seconds: float
    flops: float | None
    flops_from: str
    num_bytes: float | None
    busy_s: float | None
    operators: Sequence[Row]
    kernels: Sequence[Row]


def roofline_row(step: Step, peaks: Peaks | None) -> Row:
    """Returns a step's row, except its rank and device.

    Columns that depend on unknown peaks or unknown work are None, except that `peak_source` is "", and `bound` is "" or "host".
    """
    dtype = _main_dtype(step)
    peak, bandwidth = (peaks.of(dtype), peaks.bytes_per_s) if peaks else (None, None)
    over = roof(step.flops, step.num_bytes, peak, peaks)
    flops_per_s, bytes_per_s = quotient(step.flops, step.seconds), quotient(step.num_bytes, step.seconds)
    # A profiler slows the host, not the kernels, so the kernels' seconds are compared with a step without the profiler.
    busy_frac = None if step.busy_s is None else min(1.0, step.busy_s / step.seconds)
    return {
        "step_s": step.seconds,
        "dtype": dtype,
        "flops": step.flops,
        "flops_from": step.flops_from,
        "bytes": step.num_bytes,
        "flops_per_s": flops_per_s,
        "bytes_per_s": bytes_per_s,
        "peak_flops_per_s": peak,
        "peak_bytes_per_s": bandwidth,
        "peak_source": peaks.source if peaks else "",
        "mfu_frac": quotient(flops_per_s, peak),
        "bandwidth_frac": quotient(bytes_per_s, bandwidth),
        "intensity_flops_per_byte": quotient(step.flops, step.num_bytes),
        "ridge_flops_per_byte": quotient(peak, bandwidth),
        "bound": HOST_BOUND if busy_frac is not None and busy_frac < MIN_BUSY_FRAC else over.bound,
        "roofline_frac": quotient(over.least_s, step.seconds),
        "busy_frac": busy_frac,
        "tensor_core_frac": _tensor_core_frac(step.kernels),
    }


def _tensor_core_frac(kernels: Sequence[Row]) -> float | None:
    """Returns the share of the kernels' seconds on Tensor Cores; None without kernels, or if too many are unknown.

    Products in 16 bits or fewer count, unless their kernel is known to run on CUDA cores. The names of kernels from Triton or
    an extension do not show where they run.
    """

    def is_unknown(row: Row) -> bool:
        return bool(row["tensor_core_used"] == UNKNOWN and row["tensor_core_eligible"] == YES)

    doubtful = _share_of(kernels, lambda row: is_unknown(row) and row["precision"] != BITS_16)
    if doubtful is None or doubtful > MAX_DOUBTFUL_FRAC:
        return None
    return _share_of(kernels, lambda row: row["tensor_core_used"] == YES or (is_unknown(row) and row["precision"] == BITS_16))


def _main_dtype(step: Step) -> str | None:
    """Returns the dtype in which most of the time of matrix products, convolutions and attention is spent."""
    totals: dict[str, float] = {}
    for row in step.operators:
        if row["dtype"] and row["kind"] in MATRIX_KINDS:
            seconds = row["host_self_s"] if step.busy_s is None else row["device_self_s"]
            totals[row["dtype"]] = totals.get(row["dtype"], 0.0) + seconds
    found = max(totals, key=lambda dtype: totals[dtype], default=None)
    return TF32 if found == WIDE and _is_mostly_tf32(step.kernels) else found


def _is_mostly_tf32(kernels: Sequence[Row]) -> bool:
    """Returns whether products of 32-bit numbers spend more time on Tensor Cores, in TF32, than on CUDA cores."""
    wide = [row for row in kernels if row["precision"] == BITS_32 and row["tensor_core_eligible"] == YES]
    known = [row for row in wide if row["tensor_core_used"] in (YES, NO)]
    return (_share_of(known, lambda row: row["tensor_core_used"] == YES) or 0.0) > 0.5


def _share_of(kernels: Sequence[Row], accept: Callable[[Row], bool]) -> float | None:
    """Returns the share of all kernels' seconds that the kernels accepted by `accept` take; None without kernels."""
    return quotient(math.fsum(row["total_s"] for row in kernels if accept(row)), math.fsum(row["total_s"] for row in kernels))


def documented_peaks(device_name: str) -> Peaks | None:
    """Returns the documented peaks of an NVIDIA GPU, given the driver's name for it, such as "NVIDIA H100 80GB HBM3".

    Returns None for a GPU that is not in the table, and for a slice of a GPU (MIG), which has only part of the peaks.
    """
    if " MIG " in device_name:
        return None
    return next((peaks for pattern, peaks in _DOCUMENTED if re.search(pattern, device_name, re.IGNORECASE)), None)


def measured_peaks(found: Mapping[str, float]) -> Peaks | None:
    """Returns the peaks that a pass measured, as in `documents.Traced.peaks`; None if it measured none."""
    flops = {dtype: value for dtype, value in found.items() if dtype != BYTES}
    return Peaks(flops_per_s=_with_float16(flops), bytes_per_s=found.get(BYTES), source="measured") if found else None


def _with_float16(flops_per_s: dict[str, float]) -> dict[str, float]:
    """Returns the peaks, with float16 added: its peak equals that of bfloat16 where both are fast."""
    known = flops_per_s.get(NARROW)
    return flops_per_s if known is None else {"float16": known, **flops_per_s}


def _of(source: str, gb_per_s: float, float32: float, **tflops: float) -> Peaks:
    """Returns peaks from a data sheet's units: TFLOPS without sparsity, and GB/s."""
    flops = {"float32": float32 * T, **{dtype: value * T for dtype, value in tflops.items()}}
    return Peaks(flops_per_s=_with_float16(flops), bytes_per_s=gb_per_s * G, source=source)


# These are dense rates: if a data sheet gives only the rate "with sparsity", half of it is used. The first pattern that matches
# counts, so special names come before general ones.
_DOCUMENTED: tuple[tuple[str, Peaks], ...] = (
    (r"\bGB300\b", _of("NVIDIA GB300 NVL72 data sheet (2025)", 8000, 80, tf32=1250, bfloat16=2500, float8=5000)),
    (r"\bB300\b", _of("NVIDIA HGX B300 data sheet (2025)", 8000, 75, tf32=1125, bfloat16=2250, float8=4500)),
    (r"\bGB200\b", _of("NVIDIA GB200 NVL72 data sheet (2024)", 8000, 80, tf32=1250, bfloat16=2500, float8=5000)),
    (r"\bB200\b", _of("NVIDIA Blackwell (HGX B200) data sheet (2024)", 8000, 80, tf32=1125, bfloat16=2250, float8=4500)),
    (r"\bGH200\b.*144|GH200.*HBM3e", _of("NVIDIA GH200 data sheet", 4900, 67, tf32=494, bfloat16=990, float8=1979)),
    (r"\bGH200\b", _of("NVIDIA GH200 data sheet", 4000, 67, tf32=494, bfloat16=990, float8=1979)),
    (r"\bH200 NVL\b", _of("NVIDIA H200 data sheet", 4800, 60, tf32=418, bfloat16=836, float8=1671)),
    (r"\bH200\b", _of("NVIDIA H200 data sheet", 4800, 67, tf32=494, bfloat16=989, float8=1979)),
    (r"\bH100 NVL\b", _of("NVIDIA H100 NVL product brief", 3938, 60, tf32=418, bfloat16=835, float8=1671)),
    (
        r"\bH[18]00\b.*PCIe",  # an H800 differs from an H100 only in its links
        _of("NVIDIA H100 architecture white paper, table 2", 2039, 51.2, tf32=378, bfloat16=756, float8=1513),
    ),
    (r"\bH100\b", _of("NVIDIA H100 architecture white paper, table 2", 3352, 66.9, tf32=494.7, bfloat16=989.4, float8=1978.9)),
    (r"\bH800\b", _of("NVIDIA H800 data sheet", 3352, 66.9, tf32=494.7, bfloat16=989.4, float8=1978.9)),
    (r"\bH20\b", _of("NVIDIA H20 data sheet", 4000, 44, tf32=74, bfloat16=148, float8=296)),
    (r"\bA100\b.*SXM.*80G", _of("NVIDIA A100 data sheet (80 GB)", 2039, 19.5, tf32=156, bfloat16=312)),
    (r"\bA100\b.*PCIe.*80G|A100 80GB PCIe", _of("NVIDIA A100 data sheet (80 GB)", 1935, 19.5, tf32=156, bfloat16=312)),
    (r"\bA100\b", _of("NVIDIA A100 architecture white paper, table 1", 1555, 19.5, tf32=156, bfloat16=312)),
    (r"\bA800\b", _of("NVIDIA A800 data sheet (80 GB)", 2039, 19.5, tf32=156, bfloat16=312)),
    (r"\bA40\b", _of("NVIDIA A40 data sheet", 696, 37.4, tf32=74.8, bfloat16=149.7)),
    (r"\bA30\b", _of("NVIDIA A30 data sheet", 933, 10.3, tf32=82, bfloat16=165)),
    (r"\bA10G\b", _of("NVIDIA A10G data sheet for AWS G5", 600, 35, tf32=35, bfloat16=70)),
    (r"\bA10\b", _of("NVIDIA A10 data sheet", 600, 31.2, tf32=62.5, bfloat16=125)),
    (r"\bL40S\b", _of("NVIDIA L40S data sheet", 864, 91.6, tf32=183, bfloat16=362, float8=733)),
    (r"\bL40\b", _of("NVIDIA L40 data sheet", 864, 90.5, tf32=90.5, bfloat16=181, float8=362)),
    (r"\bL4\b", _of("NVIDIA L4 data sheet", 300, 30.3, tf32=60, bfloat16=121, float8=242.5)),
    (r"\bT4\b", _of("NVIDIA T4 data sheet", 320, 8.1, float16=65)),
    (r"\bV100\b.*PCIe", _of("NVIDIA V100 data sheet", 900, 14, float16=112)),
    (r"\bV100S\b", _of("NVIDIA V100 data sheet", 1134, 16.4, float16=130)),
    (r"\bV100\b", _of("NVIDIA V100 data sheet", 900, 15.7, float16=125)),
    (r"\bP100\b.*PCIe", _of("NVIDIA P100 data sheet", 732, 9.3, float16=18.7)),
    (r"\bP100\b", _of("NVIDIA P100 data sheet", 732, 10.6, float16=21.2)),
    (r"RTX 6000 Ada", _of("NVIDIA RTX 6000 Ada data sheet", 960, 91.1, tf32=182.2, bfloat16=364.2, float8=728.5)),
    (r"RTX A6000", _of("NVIDIA RTX A6000 data sheet, GA102 white paper", 768, 38.7, tf32=77.4, bfloat16=154.8)),
    (
        r"RTX 5090\b(?! D| Laptop)",
        _of("NVIDIA RTX Blackwell white paper, appendix A", 1792, 104.8, tf32=104.8, bfloat16=209.5, float8=419),
    ),
    (
        r"RTX 4090\b(?! D| Laptop)",
        _of("NVIDIA Ada GPU architecture white paper, appendix A", 1008, 82.6, tf32=82.6, bfloat16=165.2, float8=330.3),
    ),
    (r"RTX 3090\b(?! Ti)", _of("NVIDIA GA102 architecture white paper, appendix A", 936, 35.6, tf32=35.6, bfloat16=71)),
)
