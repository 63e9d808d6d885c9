"""Wraps NVML (package nvidia-ml-py). A value that a device or an older library does not provide is None."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

MISSING = "the package nvidia-ml-py is missing or broken"
FOREIGN = "another package named pynvml hides nvidia-ml-py"
# Functions in every release of NVIDIA's package. Other packages with a module pynvml, such as PyPI's first `pynvml`, may lack
# some of them.
NEEDED = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
# Why clocks are lowered: bit of NVML's clock event reasons (nvml.h) -> name of the cause. Two bits have the same name.
SLOWDOWNS = {
    0x04: "power_cap",
    0x08: "hardware",
    0x20: "thermal",  # software thermal slowdown
    0x40: "thermal",  # hardware thermal slowdown
    0x80: "power_brake",
}
# NVML's functions that return these bits. Drivers before 535 have only the second function.
SLOWDOWN_QUESTIONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
# NVML's functions that measure a whole GPU. On a GPU divided into slices (MIG), their values are for all slices together.
OF_WHOLE_GPU = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage")


def is_divided(mode: Any) -> bool:
    """Whether a GPU is divided into slices (MIG). `mode`: result of nvmlDeviceGetMigMode, [now, after a reset], or None."""
    return bool(mode) and bool(mode[0])


class Nvml:
    """NVML, initialised, or the reason why it is unavailable.

    Args:
        module: the pynvml module; a fake in tests; None if NVML is unavailable.
        problem: why NVML is unavailable, in a few words; "" if it is available.
        code: NVML's error number; None if the package itself is missing or broken, or if there is no problem.
    """

    def __init__(self, module: Any, problem: str = "", code: int | None = None) -> None:
        self._module, self.problem, self.code = module, problem, code

    def ask(self, name: str, *arguments: Any) -> Any:
        """Returns the result of one NVML function; None if the function fails: unsupported, not permitted or unknown."""
        if self._module is None:
            return None
        try:
            return getattr(self._module, name)(*arguments)
        except Exception:  # usually an NVMLError; other errors from older releases, and for undecodable names (WSL)
            return None

    def text(self, name: str, *arguments: Any) -> str | None:
        """Returns the result of one NVML function as text; older releases return bytes."""
        return text_of(self.ask(name, *arguments))

    def handles(self) -> list[Any]:
        """Returns the handles of all GPUs that answer, in NVML's order."""
        found = [self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(self.ask("nvmlDeviceGetCount") or 0)]
        return [handle for handle in found if handle is not None]


@contextlib.contextmanager
def session() -> Iterator[Nvml]:
    """Yields NVML, initialised until the context ends. Sessions may be nested: the driver is initialised once."""
    pynvml, problem = library()
    if pynvml is None:
        yield Nvml(None, problem)
        return
    try:
        pynvml.nvmlInit()
    except Exception as error:
        code = getattr(error, "value", None)  # only an NVMLError has one; any other error means a broken package
        yield Nvml(None, _with(MISSING, error) if code is None else str(error), code)
        return
    try:
        yield Nvml(pynvml)
    finally:
        with contextlib.suppress(Exception):  # the driver may be gone by now; then nothing is left to shut down
            pynvml.nvmlShutdown()


def library() -> tuple[Any, str]:
    """Returns the pynvml module and "", or None and why it cannot be used."""
    try:
        import pynvml
    except (Exception, SystemExit) as error:  # a different package of that name may raise anything
        return None, _with(MISSING if isinstance(error, ModuleNotFoundError) else FOREIGN, error)
    lacking = [name for name in NEEDED if not hasattr(pynvml, name)]
    return (None, f"{FOREIGN}: it lacks {', '.join(lacking)}") if lacking else (pynvml, "")


def _with(problem: str, error: BaseException) -> str:
    return f"{problem} ({type(error).__name__}: {error})"


def text_of(value: Any) -> str | None:
    """Returns a result of NVML, text or bytes, as text; None for None."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else None if value is None else str(value)
