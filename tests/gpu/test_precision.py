"""bf16, fp16 with loss scaling, and TF32 take effect, and the loss stays finite."""

from collections.abc import Callable

import pytest

from autotune.records import Knobs
from tests.gpu.conftest import SMALL, Make

pytestmark = pytest.mark.gpu
FORMATS: list[Knobs] = [
    {"precision.amp": "bf16"},
    {"precision.amp": "fp16"},
    {"precision.matmul": "high"},
    {"precision.amp": "bf16", "layout.channels_last": True, "optimizer.implementation": "fused"},
]


@pytest.mark.parametrize("knobs", FORMATS, ids=lambda knobs: " ".join(f"{key}={value}" for key, value in knobs.items()))
def test_a_format_takes_effect(recipe: Make, knobs: Knobs, record_property: Callable[[str, object], None]) -> None:
    trials = recipe(*SMALL, "data=synthetic")
    measured = trials.works(knobs)
    record_property("samples/s", f"{trials.baseline.rate_per_s:.0f} -> {measured.rate_per_s:.0f}")
    assert measured.result
    assert measured.result.loss
    record_property("loss", measured.result.loss["last"])
    if knobs.get("precision.amp") == "fp16":
        assert measured.result.scaling
        record_property("scaling", measured.result.scaling)
        assert measured.result.scaling["scale"] >= 1
