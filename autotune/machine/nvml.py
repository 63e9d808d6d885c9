"""NVML (package nvidia-ml-py) as the facts of this machine ask it: what a device or an older library does not say is None."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

MISSING = "the package nvidia-ml-py is missing or broken"
# Bits of NVML's clock event reasons that mean lost speed, by the name people know them under.
SLOWDOWNS = {
    0x04: "power_cap",
    0x08: "hardware",
    0x20: "thermal",  # software thermal slowdown
    0x40: "thermal",  # hardware thermal slowdown
    0x80: "power_brake",
}
# NVML's question for them; the second name is that of drivers before 535.
SLOWDOWN_QUESTIONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


class Nvml:
    """The library, initialised; or nothing, with the reason.

    Args:
        module: the pynvml module; a fake in tests. None for nothing.
        problem: why there is none, in a few words; "" where there is.
        code: NVML's number of that problem; None where the package itself is not there.
    """

    def __init__(self, module: Any, problem: str = "", code: int | None = None) -> None:
        self._module, self.problem, self.code = module, problem, code

    def ask(self, name: str, *arguments: Any) -> Any:
        """Returns the answer of one of NVML's functions; None where it is not supported, not permitted or not known."""
        if self._module is None:
            return None
        try:
            return getattr(self._module, name)(*arguments)
        except (self._module.NVMLError, AttributeError, TypeError):  # the last: names that older releases took otherwise
            return None

    def text(self, name: str, *arguments: Any) -> str | None:
        """Returns an answer as text; older releases give bytes."""
        return text_of(self.ask(name, *arguments))

    def handles(self) -> list[Any]:
        """Returns a handle of every GPU that answers, in NVML's order."""
        found = [self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(self.ask("nvmlDeviceGetCount") or 0)]
        return [handle for handle in found if handle is not None]


@contextlib.contextmanager
def session() -> Iterator[Nvml]:
    """Yields NVML while it is needed. Sessions may lie within each other: the driver is initialised once."""
    try:
        import pynvml
    except Exception as error:  # another package of that name may raise anything
        yield Nvml(None, f"{MISSING} ({type(error).__name__}: {error})")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Nvml(None, str(error), getattr(error, "value", None))
        return
    try:
        yield Nvml(pynvml)
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # the driver may be gone by now: nothing is left to give back
            pynvml.nvmlShutdown()


def text_of(value: Any) -> str | None:
    """Returns an answer as text; None as it is."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else None if value is None else str(value)
