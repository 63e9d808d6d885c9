"""GPUs as NVML names them; no CUDA context is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# What the drivers of NVIDIA (also on Jetson boards), of AMD and of WSL make. NVML may be missing beside each of them.
DRIVER_FILES = ("nvidiactl", "nvhost-gpu", "nvmap", "kfd", "dxg")


def gpus() -> list[dict[str, Any]]:
    """Returns {"name", "uuid", "memory_bytes", "driver", "has_energy_counter", "has_power_reading"} of every GPU.

    What a device does not report is None; [] without NVML, a driver or permission.
    """
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion)
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_gpu(handle, driver) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def has_gpu_driver(devices: Path = Path("/dev")) -> bool:
    """Whether the system has a driver that PyTorch could have a CUDA device from; without one it certainly has none."""
    return any((devices / name).exists() for name in DRIVER_FILES)


def _gpu(handle: Any, driver: str | None) -> dict[str, Any]:
    import pynvml

    try:
        memory_bytes: int | None = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        memory_bytes = None
    name, uuid = _text(pynvml.nvmlDeviceGetName, handle), _text(pynvml.nvmlDeviceGetUUID, handle)
    has_energy, has_power = (
        _answers(name, handle) for name in ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage")
    )
    facts = {"name": name, "uuid": uuid, "memory_bytes": memory_bytes, "driver": driver}
    return {**facts, "has_energy_counter": has_energy, "has_power_reading": has_power}


def _answers(name: str, handle: Any) -> bool:
    """Returns whether a device answers one of NVML's questions; an older library does not know them all."""
    import pynvml

    try:
        getattr(pynvml, name)(handle)
    except (pynvml.NVMLError, AttributeError):
        return False
    return True


def _text(ask: Any, *args: Any) -> str | None:
    import pynvml

    try:
        answer = ask(*args)
    except pynvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else str(answer)
