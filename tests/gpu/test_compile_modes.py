"""torch.compile's modes take effect on a GPU: Triton kernels, and CUDA graphs in the modes that use them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.harness.protocol import STDOUT_FILE
from tests.gpu.conftest import Make

pytestmark = pytest.mark.gpu
GRAPHS = Path(__file__).with_name("graphs_program.py")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_mode_works_on_an_image_network(
    program: Make, mode: str, record_property: Callable[[str, object], None]
) -> None:
    trials = program("--batch", "64")
    measured = trials.works({"compile.mode": mode, "precision.amp": "bf16", "layout.channels_last": True})
    assert measured.result
    record_property("samples/s", f"{trials.baseline.rate_per_s:.0f} -> {measured.rate_per_s:.0f}")
    record_property("compiled", measured.result.compiled)
    assert measured.result.compiled["graphs"] > 0
    assert not measured.result.compiled["recompile_limit_hit"]


@pytest.mark.parametrize(("mode", "has_graphs"), [("default", False), ("reduce-overhead", True)])
def test_only_reduce_overhead_mode_records_cuda_graphs(
    program: Make, mode: str, has_graphs: bool, record_property: Callable[[str, object], None]
) -> None:
    trials = program(file=GRAPHS)
    trials.works({"compile.mode": mode})
    said = [line for line in (trials.bench.last_folder / STDOUT_FILE).read_text().splitlines() if line.startswith("graphs")]
    record_property("said", said)
    assert said, "the program did not reach its 40th step"
    assert (int(said[0].split()[1]) > 0) == has_graphs
