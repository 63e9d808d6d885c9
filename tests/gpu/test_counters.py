"""NVML reports the device's utilisation, memory, clock, power, energy and slowdowns while a program runs."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from autotune.machine.gpus import cuda_uuids, gpus
from autotune.monitors.nvml import SLOWDOWN_FIELDS, DeviceMonitor

pytestmark = pytest.mark.gpu
SAMPLES = 4


def test_cuda_answers_with_the_uuids_that_nvml_lists() -> None:
    assert sorted(cuda_uuids()) == sorted(gpu["uuid"] for gpu in gpus())


def test_every_nvml_counter_reports_plausible_values(
    monitor: DeviceMonitor, holder: Callable[[int], Any], record_property: Callable[[str, object], None]
) -> None:
    idle_bytes = monitor.memory_used_bytes()
    assert idle_bytes is not None
    with holder(1024):
        time.sleep(1.0)  # NVML's own sample period
        monitor.restart()
        monitor.open_window()
        samples = []
        for _ in range(SAMPLES):
            samples.append(monitor.sample(is_steady=True))
            time.sleep(1.0)
        monitor.close_window()
        metrics = monitor.metrics()
        processes = monitor.compute_processes()
    record_property("metrics", {name: round(value, 4) for name, value in metrics.items()})
    record_property("processes seen", len(processes))
    unknown = {name for sample in samples if sample for name, value in vars(sample).items() if value is None}
    assert not unknown
    assert metrics["gpu.utilisation_frac"] > 0.5
    assert metrics["gpu.memory_used_bytes"] > idle_bytes + 2**30
    assert metrics["gpu.energy_j"] > 0
    assert metrics["gpu.power_w"] == pytest.approx(metrics["gpu.energy_j"] / metrics["gpu.energy_s"], rel=0.05)
    assert {f"gpu.slowdown_{name}_frac" for name in SLOWDOWN_FIELDS} <= set(metrics)
    assert all(0 <= metrics[f"gpu.slowdown_{name}_frac"] <= 1.01 for name in SLOWDOWN_FIELDS)
