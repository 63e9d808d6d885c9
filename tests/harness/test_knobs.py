"""Every knob is applied and verified, or its report says why not."""

from typing import Any

import pytest
import torch

from autotune.harness import protocol, report
from autotune.harness.knobs.base import KnobHandler
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from tests.harness.conftest import Trial
from tests.harness.contexts import context

BY_NEW_API = pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="this API is new in torch 2.9")
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
        (("half=1",), {"precision.amp": "bf16"}, NOT_APPLICABLE, "the parameters are bf16 already"),
        (("compile=eager",), {"compile.mode": "default"}, OVERRIDDEN, "the program compiles this module itself"),
        ((), {"no.such_knob": 1}, NOT_APPLICABLE, "the harness does not know this knob"),
        ((), {"env.SOME_VARIABLE": "seen"}, OVERRIDDEN, "'seen' was requested, but the process has None"),
    ],
)
def test_a_knob_that_cannot_be_applied_says_why(
    trial: Trial, words: tuple[str, ...], knobs: dict[str, Any], status: str, reason: str
) -> None:
    found = trial("basic.py", *words, knobs=knobs, mode="inspect").result()
    (report,) = found.knobs.values()
    assert (report.status, report.reason) == (status, reason)


def test_optimizer_without_a_fused_implementation_may_use_the_others(trial: Trial) -> None:
    found = trial("basic.py", "optimizer=rmsprop", mode="inspect").result()
    told = {key: reason for key, reason in found.applicability.items() if key.startswith("optimizer.implementation")}
    assert told == {"optimizer.implementation=fused": "RMSprop has no fused implementation"}


@pytest.mark.parametrize("place", ["inner", "outer"])
def test_the_programs_own_autocast_is_seen(trial: Trial, place: str) -> None:
    assert trial("own_autocast.py", place, mode="inspect").result().observed["precision.amp"] == "bf16"


@pytest.mark.parametrize("place", ["inner", "outer"])
@pytest.mark.parametrize(
    ("asked", "computed"), [("off", "torch.float32"), ("bf16", "torch.bfloat16"), ("fp16", "torch.float16")]
)
def test_a_trials_precision_takes_the_place_of_the_programs_own(trial: Trial, place: str, asked: str, computed: str) -> None:
    run = trial("own_autocast.py", place, knobs={"precision.amp": asked}, mode="inspect")
    report = run.result().knobs["precision.amp"]
    assert (report.status, report.observed) == (APPLIED, asked)
    assert {line for line in run.stdout.splitlines() if line.startswith("torch.")} == {computed}


@pytest.mark.parametrize(("asked", "computed"), [("off", "torch.float32"), ("fp16", "torch.float16")])
def test_a_trials_precision_also_covers_frozen_modules_that_the_program_covers(trial: Trial, asked: str, computed: str) -> None:
    run = trial("own_autocast.py", "outer", "teacher", knobs={"precision.amp": asked}, mode="inspect")
    assert run.result().knobs["precision.amp"].status == APPLIED
    assert {line for line in run.stdout.splitlines() if line.startswith("teacher")} == {f"teacher: {computed}"}


@pytest.mark.parametrize("place", ["inner", "outer"])
def test_the_programs_own_precision_returns_if_the_trials_cannot_be_kept(trial: Trial, place: str) -> None:
    run = trial("own_autocast.py", place, "changes", knobs={"precision.amp": "fp16"})
    assert run.result().knobs["precision.amp"].status == NOT_APPLICABLE  # the program changes its gradients itself
    computed = [line for line in run.stdout.splitlines() if line.startswith("torch.")]
    assert (computed[0], set(computed[-10:])) == ("torch.float16", {"torch.bfloat16"})


@BY_NEW_API
@pytest.mark.parametrize(("precision", "value"), [("tf32", "high"), ("bf16", "medium"), ("ieee", "highest")])
def test_a_precision_that_the_program_sets_by_the_new_api_is_read(trial: Trial, precision: str, value: str) -> None:
    found = trial("basic.py", f"precision={precision}", mode="inspect").result()
    assert "harness_problems" not in found.detected
    assert found.observed["precision.matmul"] == value
    assert found.observed["optimizer.implementation"] == "default"


@BY_NEW_API
def test_a_knob_replaces_a_precision_that_was_set_by_the_new_api(trial: Trial) -> None:
    found = trial("basic.py", "precision=tf32", knobs={"precision.matmul": "highest"}, mode="inspect").result()
    assert (found.knobs["precision.matmul"].status, found.knobs["precision.matmul"].observed) == (APPLIED, "highest")


@BY_NEW_API
def test_a_precision_that_the_program_changes_later_by_the_new_api_is_read(trial: Trial) -> None:
    found = trial("basic.py", "late=ieee", knobs={"precision.matmul": "high"}, mode="inspect").result()
    assert (found.knobs["precision.matmul"].status, found.knobs["precision.matmul"].observed) == (OVERRIDDEN, "highest")


def test_knob_that_cannot_be_read_back_does_not_affect_other_reports() -> None:
    broken, other = KnobHandler(context({"a": 1})), KnobHandler(context({"b": 2}))
    broken.keys, other.keys = ("a",), ("b",)
    broken.observe = lambda: torch.cuda.not_there()  # type: ignore[method-assign]
    other.observe = lambda: {"b": 2}  # type: ignore[method-assign]
    found = protocol.RankResult(trial=0, nonce="", rank=0, world_size=1, pid=0, status="ended")
    whole = context({"a": 1, "b": 2}, handlers=(broken, other))
    with pytest.raises(AttributeError):
        report._add_knobs(found, whole)
    assert {key: each.status for key, each in found.knobs.items()} == {"a": NOT_APPLICABLE, "b": APPLIED}
    assert found.observed == {"b": 2}
    assert "not_there" in found.knobs["a"].reason
