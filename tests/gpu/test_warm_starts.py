"""Warm starts on a GPU: the server does not touch CUDA, and its fork trains as fast as a freshly started process."""

from collections.abc import Callable

import pytest

from autotune.monitors.gate import MemoryGate
from autotune.monitors.nvml import DeviceMonitor
from tests.gpu.conftest import SMALL, Make

pytestmark = pytest.mark.gpu


def test_forked_trial_uses_the_gpu_and_its_server_holds_no_device_memory(
    monitor: DeviceMonitor, recipe: Make, record_property: Callable[[str, object], None]
) -> None:
    gate = MemoryGate(monitor, slack_bytes=64 * 2**20)  # a CUDA context takes more than this
    trials = recipe(*SMALL, "data=synthetic")
    fresh, warm, again = trials.works({}, is_fresh=True), trials.works({}), trials.works({})
    assert [trial.start for trial in (fresh, warm, again)] == ["fresh", "warm", "warm"]
    assert warm.result
    assert warm.result.memory["kind"] == "cuda"
    record_property("samples/s", f"fresh {fresh.rate_per_s:.0f}, warm {warm.rate_per_s:.0f} and {again.rate_per_s:.0f}")
    record_property("ready after", f"fresh {fresh.ready_s:.2f} s, warm {again.ready_s:.3f} s")
    assert gate.wait() == "", "the warm server, which still runs, holds device memory"
