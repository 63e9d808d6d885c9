"""bf16, fp16 with loss scaling, and TF32 take effect, and the loss stays finite."""

from collections.abc import Callable

import pytest

from autotune.records import Knobs
from tests.gpu.conftest import SMALL, Make

pytestmark = pytest.mark.gpu
FORMATS: list[Knobs] = [
    {"precision.amp": "bf16"},
    {"precision.amp": "fp16"},
    {"precision.amp": "fp16", "optimizer.implementation": "fused"},
    {"precision.matmul": "high"},
    {"precision.amp": "bf16", "layout.channels_last": True, "optimizer.implementation": "fused"},
]


@pytest.mark.parametrize("knobs", FORMATS, ids=lambda knobs: " ".join(f"{key}={value}" for key, value in knobs.items()))
def test_number_format_takes_effect(recipe: Make, knobs: Knobs, record_property: Callable[[str, object], None]) -> None:
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


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_linear_layers_compute_in_float8(recipe: Make, scaling: str, record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: what float8 gains is not known")
    pytest.importorskip("transformers", reason="transformers is not installed: there is no model of linear layers")
    sizes = ("model.num_layers=4", "model.hidden_size=1024", "model.vocab_size=1024", "data.sequence_length=512")
    trials = recipe("model=gpt2_small", "data=synthetic", *sizes)
    rates = [trials.works({"precision.amp": "bf16", "compile.mode": "default", **more}).rate_per_s
             for more in ({}, {"precision.float8": scaling})]  # fmt: skip
    record_property("samples/s", " -> ".join(f"{rate:.0f}" for rate in rates if rate))
