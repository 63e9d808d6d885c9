"""Watches the machine: waits for a free device before a trial, samples during it, then says what disturbed its window."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autotune.clock import Clock
from autotune.harness.protocol import Progress, RankResult
from autotune.machine.visible import NUMBER, entries_from, visible_gpus
from autotune.monitors.cpu import CpuLook, CpuMonitor, CpuUse, WaitingWatch, cores_of, read_processes, tree
from autotune.monitors.disturbances import MIN_WINDOW_S, Disturbance, of_cpu, of_device
from autotune.monitors.gate import MemoryGate
from autotune.monitors.host import HostMonitor, read_times
from autotune.monitors.nvml import DeviceMonitor, NoDevice, as_one, open_device

PAUSE_S = 1.0  # minimum time between two samples of the device
# Phases of the program. The measured window begins with STEADY and ends with OVER.
STEADY, OVER = "steady", "exit"


class MachineWatch:
    """Watches the machine for a study. The study's thread calls `look` each time it polls the trial.

    For this class, the window lasts from the first poll that sees phase STEADY to the first poll that sees phase OVER. Each of
    these polls is up to 0.1 s late. Counters are read at these two polls, and the device is sampled once a second in between.

    Args:
        device: monitor of the device, or of several.
        clock: source of time.
        cpu: monitor of the CPU.
        cores: the cores of the slot to watch; empty if the study has no slots (parallel trials). Ignored if `cpu` is given.
    """

    def __init__(
        self, device: DeviceMonitor, clock: Clock, cpu: CpuMonitor | None = None, *, cores: Collection[int] = ()
    ) -> None:
        self._clock, self._cpu = clock, cpu or CpuMonitor(slot=cores)
        self._host = HostMonitor(read_times, clock.monotonic)
        self._looked_s = 0.0
        self._opened: CpuLook | None = None
        self._use: CpuUse | None = None
        self._host_metrics: dict[str, float] = {}
        self._waiting = WaitingWatch()
        self._own: frozenset[int] = frozenset()
        self._trial: frozenset[int] = frozenset()
        self._cores: frozenset[int] = frozenset()  # cores of the current or last trial; if empty, autotune's cores are watched
        self._strangers: dict[int, float | None] = {}  # foreign process on the device -> its largest share, None if unknown
        self._is_own_seen = self._is_closed = False
        self.use(device)

    def use(self, device: DeviceMonitor) -> None:
        """Watches this device from now on. Its present processes and memory use count as its idle state."""
        self._device = device
        self._residents = set(device.compute_processes())
        self._gate = MemoryGate(device, clock=self._clock.monotonic)

    def follow(self, results: Sequence[RankResult]) -> None:
        """Switches to the devices that a trial's ranks reported, unless they are watched already. Call it between trials.

        A user's command may choose its devices itself, as torchrun and some scripts do. Until the first trial has reported its
        devices, the configured devices are watched.
        """
        reported = list(dict.fromkeys(uuid for result in results for uuid in result.facts.get("device_uuids") or ()))
        if not reported or set(reported) == {device.uuid for device in self._device.devices}:
            return
        found = [open_device(uuid=uuid) for uuid in reported]
        if any(isinstance(device, NoDevice) for device in found):  # on another machine, or unknown to NVML
            as_one(found).close()
            return
        self._device.close()
        self.use(as_one(found))

    def beside(self, study: str) -> None:
        """Sets the study whose processes are not foreign: their marks (MARK_VARIABLE) begin with `study`. "" for none."""
        self._cpu.study = study

    def before(self, *, max_s: float = 30.0) -> str:
        """Waits up to `max_s` until the device's memory is free, and discards the last trial's data.

        Returns:
            What still holds the memory, in words; "" if it is free.
        """
        held = self._gate.wait(max_s, sleep=self._clock.sleep)
        self._device.restart()
        self._host.restart()
        self._opened, self._use, self._host_metrics, self._strangers = None, None, {}, {}
        self._is_own_seen = self._is_closed = False
        return held

    def look(self, progress: Progress | None) -> None:
        """Detects the window's start and end, and samples the device at most once per PAUSE_S."""
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
        """Ends the window, if it is open. The trial's processes may have exited by now."""
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
        """Returns what slowed the trial down in its window. Call it after the window has ended."""
        if self._opened is None:
            return []
        strangers = self._strangers if self._is_own_seen else {}
        return [*of_cpu(self._use), *of_device(self._device.metrics(), strangers)]

    @property
    def cpu_use(self) -> CpuUse | None:
        """CPU use and bytes read in the window; None when unknown."""
        return self._use

    def at_rest(self) -> list[Disturbance]:
        """Returns what would disturb a trial that ran now. Call it while no trial runs. Blocks for `MIN_WINDOW_S`."""
        before = self._cpu.look(self._clock.monotonic())
        self._clock.sleep(MIN_WINDOW_S)
        use = self._cpu.use(before, self._cpu.look(self._clock.monotonic()), self._cores)
        samples = [device.sample(is_steady=False) for device in self._device.devices]
        slowed = {f"gpu.slowdown_{name}_frac": 1.0 for sample in samples if sample for name in sample.slowdowns or ()}
        return [*of_cpu(use, is_trial_running=False), *of_device(slowed, {})]

    def metrics(self) -> dict[str, float]:
        """Returns the window's metrics, named as in the tracker. Device memory: the peak since the last call of `before()`."""
        cpu = self._use.metrics() if self._use else {}
        device = self._device.metrics()
        if self._is_own_seen:
            device["gpu.foreign_processes"] = float(len(self._strangers))
        return {**device, **(self._host_metrics or self._host.metrics()), **cpu}

    def used_frac(self) -> float | None:
        """Returns the largest share of the device's memory in use since the last call of `before()`; None when unknown."""
        return self._device.memory_used_frac()

    def close(self) -> None:
        """Releases NVML."""
        self._device.close()

    def _open(self) -> None:
        self._host.restart()
        self._device.open_window()
        self._opened = self._cpu.look(self._clock.monotonic())
        self._own, self._trial = self._cpu.own(self._opened) - {os.getpid()}, self._cpu.trial(self._opened)
        self._cores = cores_of(self._trial)
        self._waiting = WaitingWatch()
        self._waiting.look(self._opened.time_s, self._trial)
        self._device.compute_processes()  # discarded: each query reports the shares since the previous one

    def _look_at_sharers(self) -> None:
        """Notes foreign processes on the device. They count only if NVML also lists a process of the trial.

        If NVML lists no process of the trial, autotune probably runs in a container in which NVML shows the host's process ids.
        Such ids cannot be compared with the container's own process ids.
        """
        found = self._device.compute_processes()
        if set(found) - self._own - self._residents:  # unknown processes: perhaps ranks that started after the window opened
            self._own |= tree(read_processes(), os.getpid())
        self._is_own_seen = self._is_own_seen or bool(self._own & set(found))
        for pid, share in found.items():
            if pid in self._own or (share is None and pid in self._residents):
                continue
            known = self._strangers.get(pid)
            self._strangers[pid] = known if share is None else max(share, known or 0.0)


def configured_device(
    kind: str, index: int, num: int, uuids: Sequence[str] = (), *, gpus: Sequence[Mapping[str, Any]] = ()
) -> DeviceMonitor:
    """Returns the monitor of the devices that trials run on; a null object if there is no device.

    NVML ignores CUDA_VISIBLE_DEVICES, so the entries of this variable (numbers or UUIDs) are resolved here. If the GPUs are of
    several kinds, CUDA and NVML may number them differently. Then UUIDs identify them.

    Args:
        kind: `device.kind`.
        index: `device.index`, the first device.
        num: how many devices, one for each process of a recipe.
        uuids: the devices of a slot. If given, these are watched, and `index` and `num` are ignored.
        gpus: all GPUs of the machine, as `machine.gpus.gpus` returns them.
    """
    if kind == "cpu":
        return NoDevice()
    if uuids:
        return as_one([open_device(uuid=uuid) for uuid in uuids])
    entries = entries_from(index, num, os.environ)
    if not entries:
        return NoDevice()
    known = [gpu.get("uuid") for gpu in visible_gpus(gpus, os.environ, index)] if any(NUMBER in gpu for gpu in gpus) else []
    named = [uuid or entry for uuid, entry in itertools.zip_longest(known[: len(entries)], entries)]
    return as_one([open_device(index=int(name)) if name.isdigit() else open_device(uuid=name) for name in named])
