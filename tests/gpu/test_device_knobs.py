"""Each knob that needs a GPU (transfers, allocators, kernels) takes effect in a real process on a GPU."""

from collections.abc import Callable

import pytest

from autotune.knobs.memory import CONFIGURATIONS
from autotune.records import Knobs
from tests.gpu.conftest import SMALL, Make

pytestmark = pytest.mark.gpu
LOADER: list[Knobs] = [
    {"loader.num_workers": 2, "loader.pin_memory": True},
    {"loader.num_workers": 2, "loader.pin_memory": True, "loader.non_blocking": True},
    {"loader.num_workers": 2, "loader.pin_memory": True, "loader.device_prefetch": True},
]
DEVICE: list[Knobs] = [
    {"backend.cudnn_benchmark": True},
    {"backend.l2_fetch_granularity": 128},
    {"optimizer.implementation": "fused"},
    *({"memory.allocator": name} for name in CONFIGURATIONS if name != "default"),
]


def words(knobs: Knobs) -> str:
    return " ".join(f"{key}={value}" for key, value in knobs.items())


@pytest.mark.parametrize("knobs", LOADER, ids=words)
def test_transfer_knob_takes_effect(recipe: Make, knobs: Knobs, record_property: Callable[[str, object], None]) -> None:
    trials = recipe(*SMALL, "data=fake_cifar")
    measured = trials.works(knobs)
    record_property("samples/s", f"{trials.baseline.rate_per_s:.0f} -> {measured.rate_per_s:.0f}")


@pytest.mark.parametrize("knobs", DEVICE, ids=words)
def test_device_knob_takes_effect(recipe: Make, knobs: Knobs, record_property: Callable[[str, object], None]) -> None:
    trials = recipe(*SMALL, "data=synthetic")
    measured = trials.works(knobs)
    record_property("samples/s", f"{trials.baseline.rate_per_s:.0f} -> {measured.rate_per_s:.0f}")


@pytest.mark.parametrize("kernel", ["flash", "mem_efficient", "cudnn", "math"])
def test_attention_kernel_takes_effect(recipe: Make, kernel: str, record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: attention's kernels are not known")
    sizes = ("model.num_layers=2", "model.hidden_size=128", "model.vocab_size=1000", "data.sequence_length=128")
    trials = recipe("model=gpt2_small", "data=synthetic", *sizes)
    measured = trials.works({"backend.sdpa": kernel, "precision.amp": "bf16"})
    record_property("samples/s", round(measured.rate_per_s or 0.0))
