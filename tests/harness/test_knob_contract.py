"""The contract of every knob: two values, each applied in a real process and read back there, whatever the other was."""

from typing import Any

import pytest

from autotune.harness.protocol import APPLIED, NOT_APPLICABLE
from autotune.knobs.catalogue import CATALOGUE
from tests.harness.conftest import Trial

# knob -> two values. Read back from where the process keeps them: the loader that yields, the weights' strides, the optimizer's
# flags, torch's settings. For pin_memory, cudnn_benchmark and matmul that is the setting; what it does to speed takes a GPU.
CONTRACT: dict[str, tuple[Any, Any]] = {
    "loader.batch_size": (8, 32),
    "loader.num_workers": (1, 2),
    "loader.prefetch_factor": (3, 4),
    "loader.pin_memory": (True, False),
    "loader.persistent_workers": (True, False),
    "precision.amp": ("bf16", "off"),
    "precision.matmul": ("high", "highest"),
    "layout.channels_last": (True, False),
    "optimizer.implementation": ("fused", "foreach"),
    "backend.cudnn_benchmark": (True, False),
    "optimizer.set_to_none": (False, True),
    "step.accumulation": (2, 1),
    "threads.intra": (2, 1),
    "threads.omp": (2, 1),
}
# In test_blocks.py, where a model has what they need; the last with a fake of the CUDA runtime: it takes a GPU.
BLOCKS = {
    "memory.activation_checkpointing": (True, False),
    "backend.sdpa": ("flash", "math"),
    "backend.l2_fetch_granularity": (128, 64),
}
COSTLY = {"compile.mode": ("default", "off"), "compile.dynamic": ("true", "auto")}  # in a test of their own


def test_every_knob_has_a_row() -> None:
    assert {*CONTRACT, *COSTLY, *BLOCKS} == set(CATALOGUE)


@pytest.mark.parametrize("which", [0, 1])
def test_each_value_takes_effect_and_is_read_back(trial: Trial, which: int) -> None:
    asked = {key: values[which] for key, values in CONTRACT.items()}
    environment = CATALOGUE["threads.omp"].environment(asked["threads.omp"])
    found = trial("basic.py", knobs=asked, mode="inspect", env=environment).result()
    assert {key: (report.status, report.observed) for key, report in found.knobs.items()} == {
        key: (APPLIED, value) for key, value in asked.items()
    }


@pytest.mark.parametrize(("mode", "is_compiled"), [("default", True), ("off", False)])
def test_compilation_makes_graphs_or_none(trial: Trial, mode: str, is_compiled: bool) -> None:
    found = trial("basic.py", knobs={"compile.mode": mode, "compile.dynamic": "true"}, mode="inspect").result()
    assert found.knobs["compile.mode"].status == APPLIED
    assert found.knobs["compile.dynamic"].status == (APPLIED if is_compiled else NOT_APPLICABLE)
    assert (found.compiled["graphs"] > 0) == is_compiled
