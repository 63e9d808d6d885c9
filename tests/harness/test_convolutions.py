"""Settings of the GPU that change nothing in a program are not applicable to it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.harness.convolutions import Convolutions
from autotune.harness.knobs.process import CUDNN, IN_16_BITS, MATMUL, NO_CONVOLUTIONS, ProcessKnobs
from tests.harness.conftest import Trial
from tests.harness.contexts import context


class Functional(nn.Module):
    """Passes its own weight to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, 3, 3))


LAZY = nn.Sequential(nn.LazyLinear(2))


@pytest.mark.parametrize(
    ("modules", "is_found"),
    [
        ([], None),
        ([LAZY], None),
        ([nn.Linear(2, 2), nn.LSTM(2, 2)], False),
        ([nn.Linear(2, 2), nn.Sequential(nn.Conv1d(1, 1, 3))], True),  # a frozen encoder, say
        ([Functional()], True),
    ],
    ids=["none", "lazy", "without", "second-has", "functional"],
)
def test_convolutions_are_found_in_any_module_that_was_called(modules: list[nn.Module], is_found: bool | None) -> None:
    found = Convolutions()
    for module in modules:
        found.see(module)
    assert found.is_found is is_found


def test_cudnn_benchmark_is_not_applicable_to_a_program_without_convolutions(trial: Trial) -> None:
    assert trial("simulated_gpu.py", mode="inspect").result().applicability[CUDNN] == NO_CONVOLUTIONS


def on_gpu(*, is_found: bool | None = True, dtypes: list[list[str]] | None = None, is_hidden: bool = False) -> dict[str, str]:
    here: Any = context()
    here.modules.convolutions.is_found, here.modules.functions.call_all_roots = is_found, is_hidden
    here.modules.reported = [SimpleNamespace(observed={"parameter_dtypes": each}) for each in dtypes or [["fp32"]]]
    return {key: reason for key, reason in ProcessKnobs(here).applicability().items() if key in (CUDNN, MATMUL)}


@pytest.mark.parametrize(
    "known", [{"is_found": None}, {"is_found": True}, {"is_found": False, "is_hidden": True}], ids=["unseen", "found", "hidden"]
)
def test_cudnn_benchmark_is_applicable_unless_it_is_known_that_nothing_convolves(known: dict[str, Any]) -> None:
    assert on_gpu(**known) == {}


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ([["bf16"], ["bf16", "fp16"]], IN_16_BITS.format("bf16 and fp16")),
        ([["bf16", "fp32"]], None),
        ([["bf16"], ["fp32"]], None),
        ([[]], None),
    ],
)
def test_tf32_is_not_applicable_if_all_parameters_are_in_16_bits(dtypes: list[list[str]], reason: str | None) -> None:
    assert on_gpu(dtypes=dtypes).get(MATMUL) == reason
