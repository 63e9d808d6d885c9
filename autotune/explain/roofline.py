"""Compares FLOPs and bytes per second with what a device can do at most.

The roofline model is by Williams et al., 2009. MFU (model FLOPs utilisation) is by Chowdhery et al., 2022: the model's FLOPs
divided by those that the device could have done in the same time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.harness.explain.documents import BYTES

T = 1e12
G = 1e9


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What a device can do at most.

    Attributes:
        flops_per_s: dtype ("float32", "tf32", "bfloat16", "float16", "float8") -> dense FLOPs per second.
        bytes_per_s: bandwidth of its memory; None if unknown.
        source: the data sheet that says so, or "measured".
    """

    flops_per_s: Mapping[str, float]
    bytes_per_s: float | None
    source: str

    def of(self, dtype: str | None, *, is_tf32: bool = False) -> float | None:
        """Returns the peak of a dtype; for float32, the peak of TF32 if `is_tf32`. None if unknown."""
        if dtype == "float32" and is_tf32 and "tf32" in self.flops_per_s:
            return self.flops_per_s["tf32"]
        return self.flops_per_s.get(dtype or "")


@dataclass(frozen=True, kw_only=True)
class Roof:
    """How fast the device could do a piece of work at its peaks.

    Attributes:
        bound: "compute" or "memory", whichever alone would take longer; "" if neither is known.
        least_s: seconds that the work would take at the peaks; None if unknown.
    """

    bound: str = ""
    least_s: float | None = None


def roof(flops: float | None, num_bytes: float | None, peak_flops_per_s: float | None, peaks: Peaks | None) -> Roof:
    """Returns the roof over some work.

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
    return Roof(bound="compute" if computing >= moving else "memory", least_s=max(computing, moving))


def documented_peaks(device_name: str) -> Peaks | None:
    """Returns the documented peaks of an NVIDIA GPU by its name as the driver gives it.

    Returns None if it is not in the table, or only a slice of a GPU (MIG), which has a part of the peaks.
    """
    if " MIG " in device_name:
        return None
    return next((peaks for pattern, peaks in _DOCUMENTED if re.search(pattern, device_name, re.IGNORECASE)), None)


def measured_peaks(found: Mapping[str, float]) -> Peaks | None:
    """Returns the peaks that a pass measured, as in `documents.Traced.peaks`; None if it measured none."""
    flops = {dtype: value for dtype, value in found.items() if dtype != BYTES}
    return Peaks(flops_per_s=flops, bytes_per_s=found.get(BYTES), source="measured") if found else None


def _of(source: str, gb_per_s: float, float32: float, **tflops: float) -> Peaks:
    """Returns peaks from a data sheet's units: TFLOPS without sparsity, and GB/s."""
    flops = {"float32": float32 * T, **{dtype: value * T for dtype, value in tflops.items()}}
    if "bfloat16" in flops:
        flops.setdefault("float16", flops["bfloat16"])
    return Peaks(flops_per_s=flops, bytes_per_s=gb_per_s * G, source=source)


# These are dense rates: if a data sheet gives only the rate "with sparsity", half of it is used. The first pattern that matches
# counts, so special names come before general ones.
_DOCUMENTED: tuple[tuple[str, Peaks], ...] = (
    (r"\bB300\b", _of("NVIDIA Blackwell Ultra data sheet (2025)", 8000, 80, tf32=1250, bfloat16=2500, float8=5000)),
    (r"\bG?B200\b", _of("NVIDIA Blackwell (HGX B200) data sheet (2024)", 8000, 80, tf32=1125, bfloat16=2250, float8=4500)),
    (r"\bGH200\b.*144|GH200.*HBM3e", _of("NVIDIA GH200 data sheet", 4900, 67, tf32=494, bfloat16=990, float8=1979)),
    (r"\bGH200\b", _of("NVIDIA GH200 data sheet", 4000, 67, tf32=494, bfloat16=990, float8=1979)),
    (r"\bH200 NVL\b", _of("NVIDIA H200 data sheet", 4800, 60, tf32=418, bfloat16=836, float8=1671)),
    (r"\bH200\b", _of("NVIDIA H200 data sheet", 4800, 67, tf32=494, bfloat16=989, float8=1979)),
    (r"\bH100 NVL\b", _of("NVIDIA H100 NVL product brief", 3938, 60, tf32=418, bfloat16=835, float8=1671)),
    (r"\bH100\b.*PCIe", _of("NVIDIA H100 architecture white paper, table 2", 2039, 51.2, tf32=378, bfloat16=756, float8=1513)),
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
        r"RTX 5090\b(?! D)",
        _of("NVIDIA RTX Blackwell white paper, appendix A", 1792, 104.8, tf32=104.8, bfloat16=209.5, float8=419),
    ),
    (
        r"RTX 4090\b(?! D)",
        _of("NVIDIA Ada GPU architecture white paper, appendix A", 1008, 82.6, tf32=82.6, bfloat16=165.2, float8=330.3),
    ),
    (r"RTX 3090\b(?! Ti)", _of("NVIDIA GA102 architecture white paper, appendix A", 936, 35.6, tf32=35.6, bfloat16=71)),
)
