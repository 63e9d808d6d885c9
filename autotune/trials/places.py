"""Defines where trials run: on the whole machine, alone, or in one of the slots that share it."""

from __future__ import annotations

from autotune.launchers.base import Launcher
from autotune.monitors.disturbances import Disturbance
from autotune.monitors.watch import MachineWatch, configured_device
from autotune.trials.inputs import StudyInputs


class Place:
    """A slot or the whole machine, where one trial at a time runs.

    Attributes:
        launcher: starts trials here.
        disturbed_by: what disturbed the last attempt here; emptied when the wait for a quiet machine begins.
    """

    def __init__(self, launcher: Launcher, inputs: StudyInputs) -> None:
        self.launcher = launcher
        self.disturbed_by: list[Disturbance] = []
        self._inputs = inputs
        self._watch: MachineWatch | None = None

    @property
    def name(self) -> str:
        """Name of the slot; "" for the whole machine."""
        return self.launcher.slot.name if self.launcher.slot else ""

    @property
    def number(self) -> str:
        """Number of the slot, for example "3". It stays the same if the slot's node is replaced. "" for the whole machine."""
        return slot_number(self.name)

    @property
    def host(self) -> str:
        """Name of the slot's machine; "" for the whole machine."""
        return self.launcher.slot.host if self.launcher.slot else ""

    @property
    def watch(self) -> MachineWatch:
        """The monitor of the machine, or of the slot's part of it; opened when it is first needed."""
        if self._watch is None:
            self._watch = self.launcher.watch() or self._watch_here()
        return self._watch

    def close(self) -> None:
        """Releases the monitors."""
        if self._watch is not None:
            self._watch.close()

    def _watch_here(self) -> MachineWatch:
        inputs, slot = self._inputs, self.launcher.slot
        kind, index, nproc = inputs.config.device.kind, inputs.config.device.index, inputs.config.launch.nproc
        device = inputs.device or configured_device(
            kind, index, nproc, slot.gpus if slot else (), gpus=inputs.machine.get("gpus") or ()
        )
        return MachineWatch(device, inputs.clock, inputs.cpu, cores=slot.cores if slot else ())


def slot_number(name: str) -> str:
    """Returns the number in the name of a slot: "3" for "3: n1, job 12"."""
    return name.partition(":")[0]
