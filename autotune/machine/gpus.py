"""Lists the GPUs through NVML, without creating a CUDA context."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.machine.nvml import OF_WHOLE_GPU, Nvml, is_divided, session
from autotune.machine.visible import BUS, NUMBER, ORDER, VISIBLE, are_unlike

# Device files of the drivers of NVIDIA (also on Jetson boards), AMD and WSL. Even if one of them exists, NVML may be missing.
DRIVER_FILES = ("nvidiactl", "nvhost-gpu", "nvmap", "kfd", "dxg")
# Asks CUDA's driver for the UUIDs of all GPUs, in the order of CUDA's numbers.
ASK_CUDA = """
import ctypes
cuda, num, device, uuid = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(num)) == 0
for number in range(num.value):
    assert cuda.cuDeviceGet(ctypes.byref(device), number) == 0 and cuda.cuDeviceGetUuid(uuid, device) == 0
    print(bytes(uuid).hex())
"""
ASK_S = 60.0  # time limit: if the driver is not loaded yet, each GPU takes seconds to initialise


def gpus() -> list[dict[str, Any]]:
    """Returns what every GPU reports, as a list in the order of NVML.

    Each entry is {"name", "uuid", "memory_bytes", "compute_capability" ([9, 0]), "driver", "has_energy_counter",
    "has_power_reading"}.

    Values that a device does not report are None; the list is empty without NVML, a driver or permission. NVML numbers GPUs by
    their place on the bus, but CUDA numbers GPUs of several kinds by speed, unless ORDER is set to BUS. If the two numbers may
    differ and CUDA's driver answers, each entry also has "cuda_number".
    """
    with session() as nvml:
        driver = nvml.text("nvmlSystemGetDriverVersion")
        found = [_gpu(nvml, handle, driver) for handle in nvml.handles()]
    if are_unlike(found) and os.environ.get(ORDER) != BUS:
        numbers = {uuid: number for number, uuid in enumerate(cuda_uuids())}
        for place, gpu in enumerate(found if numbers else ()):
            gpu[NUMBER] = numbers.get(gpu["uuid"], len(found) + place)  # GPUs that CUDA does not use come last
    return found


def cuda_uuids() -> list[str]:
    """Returns the UUIDs of all GPUs in the order of CUDA's numbers; [] if CUDA's driver does not answer.

    A child process asks the driver, because the driver stays initialised in the process that asks.
    """
    environment = {name: text for name, text in os.environ.items() if name != VISIBLE}
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-c", ASK_CUDA], env=environment, capture_output=True, text=True, timeout=ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    found = answer.stdout.split()
    return [f"GPU-{u[:8]}-{u[8:12]}-{u[12:16]}-{u[16:20]}-{u[20:]}" for u in found]


def slice_memory_bytes(uuid: str) -> int | None:
    """Returns the memory of a slice of a GPU (MIG), which `gpus` does not list; None if NVML does not know it."""
    with session() as nvml:
        handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
        memory = None if handle is None else nvml.ask("nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None else int(memory.total)


def has_gpu_driver(devices: Path = Path("/dev")) -> bool:
    """Whether device files show that a GPU driver is loaded. Without a driver, PyTorch finds no CUDA device."""
    return any((devices / name).exists() for name in DRIVER_FILES)


def _gpu(nvml: Nvml, handle: Any, driver: str | None) -> dict[str, Any]:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    is_whole = not is_divided(nvml.ask("nvmlDeviceGetMigMode", handle))
    has_energy_counter, has_power_reading = (is_whole and nvml.ask(name, handle) is not None for name in OF_WHOLE_GPU)
    capability = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle)
    return {
        "name": nvml.text("nvmlDeviceGetName", handle),
        "uuid": nvml.text("nvmlDeviceGetUUID", handle),
        "memory_bytes": None if memory is None else int(memory.total),
        "compute_capability": list(capability) if capability else None,
        "driver": driver,
        "has_energy_counter": has_energy_counter,
        "has_power_reading": has_power_reading,
    }
