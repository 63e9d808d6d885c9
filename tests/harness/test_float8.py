"""Linear layers are computed in float8 by torchao, with the program's own parameters."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.harness.knobs import float8, module
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE
from tests.harness.conftest import Trial

KEY = "precision.float8"
LINEAR, CONVERTED = "Linear", "Float8Linear"


@pytest.fixture
def runs(trial: Trial) -> Any:
    def run(value: str, *words: str, **knobs: Any) -> Any:
        found = trial("float8.py", *words, knobs={KEY: value, **knobs}, mode="parity", seed=1, max_steps=20)
        return found.result(), json.loads((found.folder / "seen.json").read_text())

    return run


def skip_without(scaling: str) -> None:
    """Skips a test if torchao is missing, or if this torch lacks the float8 product on a CPU, as torch 2.11 lacks "rowwise"."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[float8]'")
    layers = nn.Sequential(nn.Linear(32, 32))
    float8.convert(layers, scaling)
    try:
        layers(torch.zeros(16, 32, dtype=torch.bfloat16))
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__} on a CPU: {error}")


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_layers_of_suitable_size_are_converted_and_train_similarly(runs: Any, scaling: str) -> None:
    skip_without(scaling)
    (plain, told), (found, seen) = runs("off"), runs(scaling)
    assert (plain.knobs[KEY].status, plain.knobs[KEY].observed) == (APPLIED, "off")
    assert (found.knobs[KEY].status, found.knobs[KEY].observed) == (APPLIED, scaling)
    assert told["layers"] == [LINEAR, "ReLU", LINEAR, "ReLU", LINEAR]
    assert seen["layers"] == [CONVERTED, "ReLU", CONVERTED, "ReLU", LINEAR]  # the last one has ten outputs
    assert seen["is_same_weight"]
    assert seen["names"] == told["names"]
    assert seen["losses"] != told["losses"]
    assert seen["losses"] == pytest.approx(told["losses"], rel=0.05)
    assert seen["losses"][-1] < 0.95 * seen["losses"][0]


def test_rowwise_scaling_needs_bf16(runs: Any) -> None:
    skip_without("rowwise")
    found, seen = runs("rowwise", "plain")
    assert (found.knobs[KEY].status, found.knobs[KEY].reason) == (NOT_APPLICABLE, float8.NOT_IN_BF16)
    assert CONVERTED not in seen["layers"]
    found, seen = runs("rowwise", "plain", **{"precision.amp": "bf16"})
    assert found.knobs[KEY].status == APPLIED
    assert CONVERTED in seen["layers"]


def test_layers_with_hooks_or_unsuitable_sizes_do_not_count_as_convertible(trial: Trial) -> None:
    assert trial("basic.py", mode="inspect").result().applicability[KEY] == float8.NO_LINEAR
    hooked = nn.Linear(32, 32)
    hooked.register_forward_hook(lambda *_: None)
    assert float8.observe(nn.Sequential(hooked, nn.Linear(30, 32))) == {"is_float8": False, "has_linear": False}
    model = nn.Sequential(nn.Linear(32, 32), nn.MultiheadAttention(32, 2))
    assert float8.observe(model) == {"is_float8": False, "has_linear": True}


def test_a_program_without_torchao_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = {"is_float8": False, "has_linear": True, "is_sharded": False, "compile.mode": "off"}
    for is_installed, problem in ((True, None), (False, float8.NO_TORCHAO)):
        monkeypatch.setattr(float8, "is_installed", lambda found=is_installed: found)
        assert module._float8_problem(observed) == problem


def test_gpu_that_is_too_old_for_float8_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a best.yaml from an H100 may be used on an A100."""
    monkeypatch.setattr(float8, "is_installed", lambda: True)
    assert module.observe(nn.Linear(32, 32))["capability"] is None  # torch emulates the products on a CPU
    on_a_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(float8.members, "parameters", lambda _: iter([on_a_gpu]))
    for capability, problem in (((8, 0), float8.TOO_OLD.format(8, 0)), ((8, 9), None), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        observed = {"is_float8": False, "has_linear": True, "is_sharded": False, "compile.mode": "off"}
        assert module._float8_problem({**observed, "capability": float8.capability(None)}) == problem


def test_projection_of_attention_is_not_converted_and_float8_is_recognised() -> None:
    skip_without("tensorwise")
    model = nn.Sequential(nn.Linear(32, 32), nn.MultiheadAttention(32, 2))
    float8.convert(model, "tensorwise")
    assert type(model[1].out_proj).__name__ != CONVERTED  # attention uses its weight without calling it
    assert float8.observe(model) == {"is_float8": True, "has_linear": False}
