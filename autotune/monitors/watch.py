"""Watching the machine during one trial: the device about once a second, the host at both ends."""

from __future__ import annotations

import threading

from autotune.monitors.host import HostMonitor
from autotune.monitors.nvml import DeviceMonitor, NoDevice

STEADY = "steady"  # the phase whose samples describe the measured window


class MachineWatch:
    """Begins when made, just before the trial is launched, and ends with `stop`.

    A thread of its own takes the device's samples, so that a slow driver never delays the study's loop. Without a device
    there is no thread. The thread touches the device monitor only; the study must not use that until `stop` has returned.

    Args:
        device: monitor of the trial's device.
        host: monitor of the host; begins a new span here.
        period_s: between two samples.
    """

    def __init__(self, device: DeviceMonitor, host: HostMonitor, *, period_s: float = 1.0) -> None:
        self._device, self._host, self._period_s = device, host, period_s
        self._phase, self._is_over = "", False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        device.restart()
        host.restart()
        if not isinstance(device, NoDevice):
            self._thread = threading.Thread(target=self._sample, name="autotune-watch", daemon=True)
            self._thread.start()

    def note(self, phase: str) -> None:
        """Takes in the trial's phase. Entering and leaving the measured window are sampled at once, to span it closely."""
        is_edge = STEADY in (phase, self._phase) and phase != self._phase
        self._phase = phase
        if is_edge:
            self._wake.set()

    def stop(self) -> dict[str, float]:
        """Ends the watch; returns the metrics of device and host, and "device_used_frac" where known.

        Without any `note` of the steady phase there are no window metrics: numbers of another phase would mislead.
        """
        if self._thread is not None and not self._is_over:
            self._is_over = True
            self._wake.set()
            self._thread.join()
        used_frac = self._device.memory_used_frac()
        known = {} if used_frac is None else {"device_used_frac": used_frac}
        return {**self._device.metrics(), **self._host.metrics(), **known}

    def _sample(self) -> None:
        while not self._is_over:
            self._wake.clear()
            self._device.sample(is_steady=self._phase == STEADY)
            self._wake.wait(self._period_s)
