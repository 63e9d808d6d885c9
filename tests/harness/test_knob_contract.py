"""The contract of every knob: two values, each applied in a real process and read back there, whatever the other was."""

from typing import Any

import pytest

from autotune.harness.protocol import APPLIED
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
    "loader.multiprocessing_context": ("forkserver", "fork"),
    "loader.in_order": (False, True),
    "loader.sharing_strategy": ("file_system", "file_descriptor"),
    "precision.amp": ("bf16", "off"),
    "precision.matmul": ("high", "highest"),
    "layout.channels_last": (True, False),
    "optimizer.implementation": ("fused", "foreach"),
    "backend.cudnn_benchmark": (True, False),
    "threads.intra": (2, 1),
    "threads.interop": (3, 2),
    "threads.omp": (2, 1),
    "threads.mkl": (2, 1),
}
# Only a GPU shows them: on fakes in test_memory.py and test_transfer.py.
ON_FAKES = {"memory.allocator", "memory.fraction", "loader.non_blocking", "loader.device_prefetch"}
# What a library, ranks or a second core must be there for: in tests of their own, test_memory.py and test_affinity.py.
ELSEWHERE = {"memory.malloc", "threads.affinity", "loader.own_cores"}
COSTLY = {"compile.mode": ("default", "off")}  # in a test of its own


def test_every_knob_has_a_row() -> None:
    assert {*CONTRACT, *COSTLY, *ON_FAKES, *ELSEWHERE} == set(CATALOGUE)


@pytest.mark.parametrize("which", [0, 1])
def test_each_value_takes_effect_and_is_read_back(trial: Trial, which: int) -> None:
    asked = {key: values[which] for key, values in CONTRACT.items()}
    environment = {name: text for key, value in asked.items() for name, text in CATALOGUE[key].environment(value).items()}
    found = trial("basic.py", knobs=asked, mode="inspect", env=environment).result()
    assert {key: (report.status, report.observed) for key, report in found.knobs.items()} == {
        key: (APPLIED, value) for key, value in asked.items()
    }


@pytest.mark.parametrize(("mode", "is_compiled"), [("default", True), ("off", False)])
def test_compilation_makes_graphs_or_none(trial: Trial, mode: str, is_compiled: bool) -> None:
    found = trial("basic.py", knobs={"compile.mode": mode}, mode="inspect").result()
    assert found.knobs["compile.mode"].status == APPLIED
    assert (found.compiled["graphs"] > 0) == is_compiled
