"""Lists the GPUs through NVML, without creating a CUDA context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.machine.nvml import OF_WHOLE_GPU, Nvml, is_divided, session

# Device files of the drivers of NVIDIA (also on Jetson boards), AMD and WSL. NVML may be missing even if one of them exists.
DRIVER_FILES = ("nvidiactl", "nvhost-gpu", "nvmap", "kfd", "dxg")


def gpus() -> list[dict[str, Any]]:
    """Returns {"name", "uuid", "memory_bytes", "driver", "has_energy_counter", "has_power_reading"} for every GPU.

    Values that a device does not report are None; the list is empty without NVML, a driver or permission.
    """
    with session() as nvml:
        driver = nvml.text("nvmlSystemGetDriverVersion")
        return [_gpu(nvml, handle, driver) for handle in nvml.handles()]


def slice_memory_bytes(uuid: str) -> int | None:
    """Returns the memory of a slice of a GPU (MIG), which `gpus` does not list; None if NVML does not know it."""
    with session() as nvml:
        handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
        memory = None if handle is None else nvml.ask("nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None else int(memory.total)


def has_gpu_driver(devices: Path = Path("/dev")) -> bool:
    """Whether there is a driver through which PyTorch may find a CUDA device. Without a driver, it finds none."""
    return any((devices / name).exists() for name in DRIVER_FILES)


def _gpu(nvml: Nvml, handle: Any, driver: str | None) -> dict[str, Any]:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    is_whole = not is_divided(nvml.ask("nvmlDeviceGetMigMode", handle))
    has_energy_counter, has_power_reading = (is_whole and nvml.ask(name, handle) is not None for name in OF_WHOLE_GPU)
    return {
        "name": nvml.text("nvmlDeviceGetName", handle),
        "uuid": nvml.text("nvmlDeviceGetUUID", handle),
        "memory_bytes": None if memory is None else int(memory.total),
        "driver": driver,
        "has_energy_counter": has_energy_counter,
        "has_power_reading": has_power_reading,
    }
