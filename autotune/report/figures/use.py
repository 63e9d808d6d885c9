"""Figure on how much of the machine a step uses: its duration, cores, device, power, share of the peak FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.explain.kernel_names import BITS_16, BITS_32
from autotune.explain.tables import MAX_DISTORTION
from autotune.quantities import DASH, flops_text, number_text, share_text, step_time_text
from autotune.report.figures.figure import Figure, Grid
from autotune.report.figures.sides import ROLES
from autotune.report.study import Study

METRICS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_p50_s": ("a step, median", step_time_text),
    "step_p95_s": ("a step, p95 (95 of 100 are shorter)", step_time_text),
    "gpu.utilisation_frac": ("GPU in use, as nvidia-smi counts it", share_text),
    "gpu.sm_clock_frac": ("clock of the GPU, share of its default", share_text),
    "gpu.sm_clock_mhz": ("clock of the GPU", lambda clock: f"{number_text(clock)} MHz"),
    "gpu.power_w": ("power of the GPU", lambda watts: f"{number_text(watts)} W"),
}
ROOFLINE: dict[str, tuple[str, Callable[[float], str]]] = {
    "busy_frac": ("GPU busy, share of a step", share_text),
    "tensor_core_frac": ("Tensor Cores, share of the kernels' time", share_text),
    "flops_per_s": ("arithmetic", flops_text),
}
PEAKS: dict[str, tuple[str, str, Callable[[float], str]]] = {
    "mfu_frac": ("arithmetic, share of the device's peak (MFU)", "peak_flops_per_s", flops_text),
    "bandwidth_frac": (
        "memory traffic, at least this share of the device's peak", "peak_bytes_per_s",
        lambda rate: f"{number_text(rate / 1e9)} GB/s",
    ),
}  # fmt: skip


def use(study: Study) -> Figure:
    """Returns the figure on the use of the machine. Baseline and best are shown by one trial of the search each."""
    title = "How well is the machine used?"
    found = {role: _facts(study, number) for role, number in study.sides.items()}
    names = list(dict.fromkeys(name for facts in found.values() for name in facts))
    if not names:
        return Figure(key="use", title=title, absent="No trial recorded how the machine was used.")
    grid = Grid(
        columns=["", *(f"{ROLES[role]} " for role in found)],
        rows=[[name, *(facts.get(name, DASH) for facts in found.values())] for name in names],
    )
    has_peaks = any(study.rows("roofline", number) for number in study.sides.values())
    notes = [] if has_peaks else [study.why_absent("roofline", "Arithmetic relative to the device's peak")]
    return Figure(key="use", title=title, says="One trial per column.", grid=grid, is_open=True, notes=notes, width="half")


def _facts(study: Study, number: int) -> dict[str, str]:
    """Returns name -> number as text, for one trial; unknown numbers are left out."""
    metrics: Mapping[str, Any] = study.records[number].metrics if number in study.records else {}
    said = {words: text(metrics[key]) for key, (words, text) in METRICS.items() if metrics.get(key)}
    if cores := metrics.get("host.own_cores"):
        all_cores = (study.summary.get("machine") or {}).get("num_cores") or "?"
        said["CPU cores in use"] = f"{number_text(cores)} of {all_cores}"
    if joules := metrics.get("gpu.energy_per_sample_j"):
        said[f"energy of the GPU per {study.unit.removesuffix('s')}"] = f"{number_text(joules)} J"
    return {**said, **_share_of_16_bits(study, number), **_against_peaks(study, number)}


def _against_peaks(study: Study, number: int) -> dict[str, str]:
    row: Mapping[str, Any] = next(iter(study.rows("roofline", number)), {})
    said = {words: text(row[key]) for key, (words, text) in ROOFLINE.items() if row.get(key) is not None}
    for key, (words, peak, text) in PEAKS.items():
        if row.get(key):
            dtype = f", {row['dtype']}" if key == "mfu_frac" and row["dtype"] else ""
            said[words] = f"{share_text(row[key])} of {text(row[peak])}{dtype}"
    return said


def _share_of_16_bits(study: Study, number: int) -> dict[str, str]:
    """Returns the share of 16-bit kernels in the time of 16-bit and 32-bit kernels; {} if unknown or distorted by profiling."""
    seconds = {str(row["category"]): float(row["seconds"]) for row in study.rows("breakdown", number)}
    whole = seconds.get(BITS_16, 0.0) + seconds.get(BITS_32, 0.0)
    if not whole or study.tables[number].distortion.get(0, 1.0) > MAX_DISTORTION:
        return {}
    return {"arithmetic in 16 bits, share of the time of all arithmetic": share_text(seconds.get(BITS_16, 0.0) / whole)}
