"""The only fake of NVML in the tests. It maps each NVML name to a function, a value or an error.

It does not imitate a real driver's timing and quirks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

MIB = 2**20
MISSING: Any = object()  # stands for a function that this release of NVML lacks


class NVMLError(Exception):
    """An error of NVML; `value` is its number."""

    def __init__(self, value: Any = None) -> None:
        super().__init__(value)
        self.value = value


class FakeNvml:
    """A fake of pynvml; `asked` lists the names used. A name without an answer is missing, as in an older release."""

    NVML_CLOCK_SM = 1
    NVMLError = NVMLError

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=1000 * MIB, used=100 * MIB),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50, memory=10),
            "nvmlDeviceGetPowerUsage": 300_000,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000,
            "nvmlDeviceGetClockInfo": 1410,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetHandleByUUID": "handle",
            **answers,
        }
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("answers", {}).get(name, MISSING) is MISSING:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.asked.append(name)
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return call

    @property
    def shutdowns(self) -> list[str]:
        """The calls of nvmlShutdown."""
        return [name for name in self.asked if name == "nvmlShutdown"]


def fake_nvml(**changes: Any) -> FakeNvml:
    """Returns the NVML of a machine with two GPUs."""
    calls = {
        "nvmlSystemGetDriverVersion": "580.1",
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": b"NVIDIA H200",  # bytes in older releases
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=141 * 10**9),
    }
    return FakeNvml(**{**calls, **changes})


def refuse(*_: object) -> object:
    raise NVMLError("not supported")
