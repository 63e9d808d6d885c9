"""The gate before a trial waits until the device's memory is free again, and names the process that holds it."""

from collections.abc import Callable
from typing import Any

import pytest

from autotune.monitors.gate import MemoryGate
from autotune.monitors.nvml import DeviceMonitor
from tests.gpu.conftest import SMALL, Make

pytestmark = pytest.mark.gpu


def test_gate_stays_closed_while_another_process_holds_device_memory(
    monitor: DeviceMonitor, holder: Callable[[int], Any], record_property: Callable[[str, object], None]
) -> None:
    gate = MemoryGate(monitor)
    assert gate.wait(deadline_s=0.0) == ""
    with holder(2048):
        held = gate.wait(deadline_s=1.0)
    record_property("said", held)
    assert "more in use than when the study began" in held
    assert gate.wait() == "", "the memory of the other process was not released"


def test_trial_releases_all_its_device_memory(monitor: DeviceMonitor, recipe: Make) -> None:
    gate = MemoryGate(monitor)
    trials = recipe(*SMALL, "data=synthetic")
    assert gate.wait() == ""
    trials.works({"loader.batch_size": 256}, is_fresh=True)
    assert gate.wait() == ""
