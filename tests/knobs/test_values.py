"""How a knob's value is read from the spellings that people use."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.errors import BadInput
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import knob
from autotune.knobs.environment import env_knob
from autotune.knobs.values import value_of

CPU = HostContext(num_cores=2)


@pytest.mark.parametrize(
    ("key", "raw", "expected"),
    [
        ("precision.amp", False, "off"),  # an unquoted `off` in YAML 1.1
        ("precision.amp", "False", "off"),
        ("compile.mode", False, "off"),
        ("compile.mode", "max-autotune", "max-autotune"),
        ("compile.dynamic", True, "true"),
        ("compile.dynamic", "False", "false"),
        ("layout.channels_last", "on", True),
        ("layout.channels_last", "No", False),
        ("loader.num_workers", "4", 4),
        ("loader.num_workers", 4.0, 4),
        ("env.FLAG", True, "true"),
        ("env.FLAG", 0, "0"),
    ],
)
def test_values_are_read_from_all_usual_spellings(key: str, raw: Any, expected: Any) -> None:
    value = value_of(knob(key), raw)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "raw", "message"),
    [
        ("loader.num_workers", "many", "not a whole number, got 'many'"),
        ("loader.num_workers", True, "not a whole number, got True"),
        ("loader.num_workers", 1.5, "not a whole number"),
        ("loader.num_workers", None, "not a whole number, got None"),
        ("loader.num_workers", [1], "not a whole number"),
        ("loader.num_workers", -1, "too small, got -1"),
        ("loader.num_workers", 10_000, "can serve, got"),
        ("loader.batch_size", 0, "too small"),
        ("loader.batch_size", 10**30, "too large, got 1000000000000000000000000000000. Allowed: 1 to 1048576."),
        ("loader.prefetch_factor", 100, "too large, got 100. Allowed: 1 to 64."),
        ("loader.pin_memory", 1, "not true or false"),
        ("nccl.nthreads", 100, "no such value, got 100. Allowed: 64, 128, 256, 512"),
        ("nccl.buffsize", 5000, "no such value, got 5000. Allowed: ..., 1024, 2048, 4096, 8192, 16384, 32768, ..."),
        ("backend.l2_fetch_granularity", 48, "no such value, got 48"),
        ("memory.fraction", "half", "not a number"),
        ("memory.fraction", True, "not a number"),
        ("precision.amp", "fp61", "no such value, got 'fp61'"),
        ("compile.mode", True, "no such value"),
        ("env.FLAG", "a\0b", "not usable text"),
        ("env.FLAG", "x" * 5000, "not usable text"),
    ],
)
def test_error_for_an_unusable_value_names_the_key(key: str, raw: Any, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        value_of(knob(key), raw, CPU)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{key}: ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["", "1X", "A-B", "A.B", "A=B", "PYTHONPATH", "AUTOTUNE_SPEC", "AUTOTUNE_MARK"])
def test_invalid_and_reserved_variable_names_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=r"^env\."):
        env_knob(name)


def test_error_for_the_variable_of_a_knob_names_the_knob() -> None:
    with pytest.raises(BadInput, match=r"threads\.omp"):
        env_knob("OMP_NUM_THREADS")


def test_default_of_an_environment_knob_is_the_value_that_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SWITCH", "7")
    assert env_knob("SOME_SWITCH").default == "7"
    assert env_knob("SOME_SWITCH").environment("8") == {"SOME_SWITCH": "8"}
    monkeypatch.delenv("SOME_SWITCH")
    assert env_knob("SOME_SWITCH").default == ""
