"""Probes the GPUs through NVML: driver, clocks, power and processes of each, and how they are connected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from autotune.machine.nvml import SLOWDOWN_QUESTIONS, SLOWDOWNS, Nvml, session
from autotune.machine.topology import topology

DEVICES = Path("/dev")
SM_CLOCK = 1  # NVML_CLOCK_SM


def look(devices: Path = DEVICES) -> dict[str, Any]:
    """Returns what is known about driver and GPUs; values that a device does not report are None.

    Returns:
        "problem", "code": why NVML does not answer, in words and as NVML's error number; "" and None if it answers;
        "has_nvidia_files", "has_amd_files": whether device files of NVIDIA's and of AMD's driver exist;
        "driver"; "cuda": newest CUDA version that the driver supports, [13, 0];
        "gpus": see `_gpu`; "num_lost": number of GPUs that the driver counts but that do not answer;
        "topology": see `topology()`.
    """
    with session() as nvml:
        version = nvml.ask("nvmlSystemGetCudaDriverVersion_v2") or nvml.ask("nvmlSystemGetCudaDriverVersion")
        handles = nvml.handles()
        return {
            "problem": nvml.problem,
            "code": nvml.code,
            "has_nvidia_files": (devices / "nvidiactl").exists(),
            "has_amd_files": (devices / "kfd").exists(),
            "driver": nvml.text("nvmlSystemGetDriverVersion"),
            "cuda": [version // 1000, version % 1000 // 10] if version else None,
            "gpus": [_gpu(nvml, place, handle) for place, handle in enumerate(handles)],
            "num_lost": (nvml.ask("nvmlDeviceGetCount") or 0) - len(handles),
            "topology": topology(),
        }


def _gpu(nvml: Nvml, place: int, handle: Any) -> dict[str, Any]:
    """Returns what one GPU reports.

    Returns:
        "index", "name", "capability" ([9, 0]), "is_persistent", "clock_mhz", "max_clock_mhz", "application_clock_mhz",
        "default_application_clock_mhz" (clocks of the multiprocessors), "slowdowns" (names from SLOWDOWNS), "temperature_c",
        "power_cap_w", "default_power_cap_w", "processes" (see `_process`).
    """
    reasons = next((bits for name in SLOWDOWN_QUESTIONS if (bits := nvml.ask(name, handle)) is not None), None)
    capability, index = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle), nvml.ask("nvmlDeviceGetIndex", handle)
    persistence = nvml.ask("nvmlDeviceGetPersistenceMode", handle)
    return {
        "index": place if index is None else index,
        "name": nvml.text("nvmlDeviceGetName", handle),
        "capability": list(capability) if capability else None,
        "is_persistent": None if persistence is None else bool(persistence),
        "clock_mhz": nvml.ask("nvmlDeviceGetClockInfo", handle, SM_CLOCK),
        "max_clock_mhz": nvml.ask("nvmlDeviceGetMaxClockInfo", handle, SM_CLOCK),
        "application_clock_mhz": nvml.ask("nvmlDeviceGetApplicationsClock", handle, SM_CLOCK),
        "default_application_clock_mhz": nvml.ask("nvmlDeviceGetDefaultApplicationsClock", handle, SM_CLOCK),
        "slowdowns": None if reasons is None else sorted({name for bit, name in SLOWDOWNS.items() if reasons & bit}),
        "temperature_c": nvml.ask("nvmlDeviceGetTemperature", handle, 0),  # NVML_TEMPERATURE_GPU
        "power_cap_w": _watts(nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
        "default_power_cap_w": _watts(nvml.ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        "processes": [_process(each) for each in nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle) or []],
    }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


def _process(process: Any) -> dict[str, Any]:
    """Returns {"pid", "name", "memory_bytes"}; "name" is None for a process of another container, whose pid is unknown here."""
    try:
        name: str | None = psutil.Process(process.pid).name()
    except psutil.Error:
        name = None
    return {"pid": int(process.pid), "name": name, "memory_bytes": getattr(process, "usedGpuMemory", None)}
