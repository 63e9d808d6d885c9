"""A CUDA out-of-memory error becomes the outcome device_oom, a memory limit holds, and the next trial can use all memory."""

from collections.abc import Callable

import pytest

from autotune.records import Outcome
from tests.gpu.conftest import SMALL, Make

pytestmark = pytest.mark.gpu
LIMIT_BYTES = 4 * 2**30


def test_too_large_batch_ends_as_device_oom_and_the_next_trial_works(
    recipe: Make, record_property: Callable[[str, object], None]
) -> None:
    trials = recipe(*SMALL, "data=synthetic", "model.image_size=224")
    broken = trials.measure({"loader.batch_size": 1_000_000})
    record_property("reason", broken.reason)
    assert broken.outcome is Outcome.device_oom, broken.reason
    trials.works({"loader.batch_size": 64})


def test_memory_limit_is_enforced_and_named_in_the_reason(recipe: Make, record_property: Callable[[str, object], None]) -> None:
    trials = recipe(*SMALL, "data=synthetic", "model.image_size=224", memory_limit_bytes=LIMIT_BYTES)
    inside = trials.works({"loader.batch_size": 64})
    assert inside.result
    record_property("memory", {name: value for name, value in inside.result.memory.items() if value is not None})
    assert inside.result.memory["peak_reserved_bytes"] <= LIMIT_BYTES
    beyond = trials.measure({"loader.batch_size": 512})
    record_property("reason", beyond.reason)
    assert beyond.outcome is Outcome.device_oom, beyond.reason
    assert "under device.memory_limit" in beyond.reason


def test_memory_fraction_knob_limits_device_memory(recipe: Make) -> None:
    trials = recipe(*SMALL, "data=synthetic", "model.image_size=224")
    trials.works({"memory.fraction": 0.5, "loader.batch_size": 64})
    assert trials.measure({"memory.fraction": 0.02, "loader.batch_size": 1024}).outcome is Outcome.device_oom
