"""NVML as a public fake: what a device answers is a function under NVML's own name."""

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    pass


def fake_nvml(**changes: object) -> SimpleNamespace:
    calls: dict[str, object] = {
        "NVMLError": NVMLError,
        "shutdowns": [],
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",  # bytes in older releases
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=141 * 10**9),
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 5_000,
        "nvmlDeviceGetPowerUsage": lambda handle: 300_000,
    }
    fake = SimpleNamespace(**{**calls, **changes})
    fake.nvmlShutdown = lambda: fake.shutdowns.append(1)
    return fake


def refuse(*_: object) -> object:
    raise NVMLError("not supported")
