"""Watches the machine round each trial: waits for a clean device before it, looks while it runs, judges its window after it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from autotune.clock import Clock
from autotune.config.schema import StudyConfig
from autotune.harness.protocol import Progress, RankResult
from autotune.machine.visible import visible_devices
from autotune.monitors.cpu import CpuLook, CpuMonitor, CpuUse, cores_of, read_processes, tree
from autotune.monitors.gate import MemoryGate
from autotune.monitors.host import HostMonitor, read_times
from autotune.monitors.nvml import DeviceMonitor, NoDevice, open_device
from autotune.monitors.several import as_one
from autotune.monitors.waiting import WaitingWatch
from autotune.trials import health
from autotune.trials.health import Disturbance

PAUSE_S = 1.0  # between two looks at the device
STEADY, OVER = "steady", "exit"  # phases: the window lies between their first signs


class MachineWatch:
    """One for a study; called from the study's own thread, between two looks at the trial.

    What is judged lies between the first sign of the measuring window and the first sign of its end, a tenth of a second late
    each: counters are read at these two moments, and the device is looked at once a second between them.

    Args:
        device: monitor of the device, or of several.
        clock: time.
        cpu: monitor of the processor.
    """

    def __init__(self, device: DeviceMonitor, clock: Clock, cpu: CpuMonitor | None = None) -> None:
        self._clock, self._cpu = clock, cpu or CpuMonitor()
        self._host = HostMonitor(read_times, clock.monotonic)
        self._looked_s = 0.0
        self._opened: CpuLook | None = None
        self._use: CpuUse | None = None
        self._host_metrics: dict[str, float] = {}
        self._waiting = WaitingWatch()
        self._own: frozenset[int] = frozenset()
        self._trial: frozenset[int] = frozenset()
        self._cores: frozenset[int] = frozenset()  # that the trial may use, or the last one did; empty for the tuner's
        self._strangers: dict[int, float | None] = {}
        self._is_own_seen = self._is_closed = False
        self.use(device)

    def use(self, device: DeviceMonitor) -> None:
        """Watches this device from now on, or these; what they hold now counts as their idle state."""
        self._device = device
        self._residents = set(device.compute_processes())
        self._gate = MemoryGate(device, clock=self._clock.monotonic)

    def follow(self, results: Sequence[RankResult]) -> None:
        """Watches the devices that the ranks of a trial have told of from now on, where they are others; called between trials.

        What a command of the user's own uses (`torchrun`, a device chosen in the script) is known from its first trial on:
        before, it is the configured device.
        """
        told = list(dict.fromkeys(uuid for result in results if (uuid := result.facts.get("device_uuid"))))
        if not told or set(told) == {device.uuid for device in self._device.devices}:
            return
        found = [open_device(uuid=uuid) for uuid in told]
        if any(isinstance(device, NoDevice) for device in found):  # of another machine, or a name that NVML does not know
            as_one(found).close()
            return
        self._device.close()
        self.use(as_one(found))

    def before(self, *, max_s: float = 30.0) -> str:
        """Waits until the device is free, at most so long, and begins a new span; returns who holds the device, or ""."""
        held = self._gate.wait(max_s, sleep=self._clock.sleep)
        self._device.restart()
        self._host.restart()
        self._opened, self._use, self._host_metrics, self._strangers = None, None, {}, {}
        self._is_own_seen = self._is_closed = False
        return held

    def look(self, progress: Progress | None) -> None:
        """Notices the window's ends, and samples the device, at most once a PAUSE_S."""
        phase = progress.phase if progress else ""
        if phase == STEADY and self._opened is None:
            self._open()
        elif phase == OVER:
            self.ended()
        now_s = self._clock.monotonic()
        if now_s - self._looked_s >= PAUSE_S and not self._is_closed:
            self._looked_s = now_s
            self._device.sample(is_steady=phase == STEADY)
            if phase == STEADY:
                self._waiting.look(now_s, self._trial)
                self._look_at_sharers()

    def ended(self) -> None:
        """Ends the window, when it was reached and is not over yet; the trial's processes may be gone."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._opened is not None:
            self._device.close_window()
            now_s = self._clock.monotonic()
            self._waiting.look(now_s, self._trial)
            use = self._cpu.use(self._opened, self._cpu.look(now_s), self._cores)
            self._use = dataclasses.replace(use, waiting_cores=self._waiting.waiting_cores(use.seconds)) if use else None
        self._host_metrics = self._host.metrics()

    def disturbances(self) -> list[Disturbance]:
        """Returns what took speed from the trial in its window; called once it is over."""
        if self._opened is None:
            return []
        strangers = self._strangers if self._is_own_seen else {}
        return [*health.of_cpu(self._use), *health.of_device(self._device.metrics(), strangers)]

    @property
    def cpu_use(self) -> CpuUse | None:
        """What became of the processor in the window, and what was read; None unknown."""
        return self._use

    def at_rest(self) -> list[Disturbance]:
        """Returns what would disturb a trial now, while none runs; takes as long as it has to look."""
        before = self._cpu.look(self._clock.monotonic())
        self._clock.sleep(health.MIN_WINDOW_S)
        use = self._cpu.use(before, self._cpu.look(self._clock.monotonic()), self._cores)
        sample = self._device.sample(is_steady=False)
        slowed = {f"gpu.slowdown_{name}_frac": 1.0 for name in (sample.slowdowns if sample else None) or ()}
        return [*health.of_cpu(use, is_trial_running=False), *health.of_device(slowed, {})]

    def metrics(self) -> dict[str, float]:
        """Returns what was seen in the window, by name for the tracker; of the device's memory, since `before`."""
        cpu = self._use.metrics() if self._use else {}
        device = self._device.metrics()
        if self._is_own_seen:
            device["gpu.foreign_processes"] = float(len(self._strangers))
        return {**device, **(self._host_metrics or self._host.metrics()), **cpu}

    def used_frac(self) -> float | None:
        """Returns the largest share of the device's memory seen in use since `before`; None unknown."""
        return self._device.memory_used_frac()

    def close(self) -> None:
        """Gives NVML back."""
        self._device.close()

    def _open(self) -> None:
        self._host.restart()
        self._device.open_window()
        self._opened = self._cpu.look(self._clock.monotonic())
        self._own, self._trial = self._cpu.own(self._opened) - {os.getpid()}, self._cpu.trial(self._opened)
        self._cores = cores_of(self._trial)
        self._waiting = WaitingWatch()
        self._waiting.look(self._opened.time_s, self._trial)
        self._device.compute_processes()  # shares are told since the last question

    def _look_at_sharers(self) -> None:
        """Notes who else computes on the device. Where none of the ids is the trial's, they are another namespace's."""
        found = self._device.compute_processes()
        if set(found) - self._own - self._residents:  # new ones: a rank that was started late?
            self._own |= tree(read_processes(), os.getpid())
        self._is_own_seen = self._is_own_seen or bool(self._own & set(found))
        for pid, share in found.items():
            if pid in self._own or (share is None and pid in self._residents):
                continue
            known = self._strangers.get(pid)
            self._strangers[pid] = known if share is None else max(share, known or 0.0)


def configured_device(config: StudyConfig) -> DeviceMonitor:
    """Returns the monitor of the devices that trials run on, as NVML counts; the null object without one.

    A recipe's processes have one each, those from `device.index` on. NVML is blind to CUDA_VISIBLE_DEVICES, which may hold
    numbers or UUIDs of its own.
    """
    device = config.device
    if device.kind == "cpu":
        return NoDevice()
    visible, asked = visible_devices(os.environ), range(device.index, device.index + config.launch.nproc)
    entries = [str(index) for index in asked] if visible is None else visible[asked.start : asked.stop]
    if not entries:
        return NoDevice()
    return as_one([open_device(index=int(entry)) if entry.isdigit() else open_device(uuid=entry) for entry in entries])
