"""Every knob is applied and seen, or its report says why not."""

from typing import Any

import pytest

from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from tests.harness.conftest import Trial

ALL: dict[str, Any] = {
    "precision.amp": "bf16",
    "precision.matmul": "high",
    "layout.channels_last": True,
    "optimizer.implementation": "foreach",
    "threads.intra": 1,
    "env.SOME_VARIABLE": "seen",
}


def test_all_knobs_at_once_are_applied_and_observed(trial: Trial) -> None:
    run = trial("basic.py", "threads=2", knobs=ALL, env={"SOME_VARIABLE": "seen"})
    found = run.result()
    assert {key: (report.status, report.observed) for key, report in found.knobs.items()} == {
        key: (APPLIED, value) for key, value in ALL.items()
    }
    assert found.observed["precision.amp"] == "off"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "knobs", "status", "reason"),
    [
        (("autocast=1",), {"precision.amp": "off"}, OVERRIDDEN, "the program enters autocast(bf16) itself"),
        (("half=1",), {"precision.amp": "bf16"}, NOT_APPLICABLE, "the parameters are bf16 already"),
        (("compile=eager",), {"compile.mode": "default"}, OVERRIDDEN, "the program compiles this module itself"),
        ((), {"no.such_knob": 1}, NOT_APPLICABLE, "the harness does not know this knob"),
        ((), {"env.SOME_VARIABLE": "seen"}, OVERRIDDEN, "the process has None, 'seen' was requested"),
    ],
)
def test_what_cannot_be_turned_says_why(
    trial: Trial, words: tuple[str, ...], knobs: dict[str, Any], status: str, reason: str
) -> None:
    found = trial("basic.py", *words, knobs=knobs, mode="inspect").result()
    (report,) = found.knobs.values()
    assert (report.status, report.reason) == (status, reason)


def test_autocast_inside_the_module_is_seen(trial: Trial) -> None:
    found = trial("inner_autocast.py", knobs={"precision.amp": "fp16"}, mode="inspect").result()
    assert found.observed["precision.amp"] == "bf16"
    assert found.knobs["precision.amp"].status == OVERRIDDEN
