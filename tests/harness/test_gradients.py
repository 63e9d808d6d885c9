"""Gradient accumulation and loss scaling, in programs of every kind: the same training, or a reason why not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from autotune.harness.gradient_state import divide, norms
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport, RankResult
from tests.harness.conftest import PROGRAMS, Run
from tests.harness.forks import Forks
from tests.programs.expectations import Program
from tests.programs.starting import run_trial

KEY, STEPS = "step.accumulation", 6
PARITY: dict[str, Any] = {"mode": "parity", "seed": 3, "max_steps": STEPS}


class Trained:
    """A run of the program: the harness's result, and the weights after each optimizer step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.result: RankResult = run.result()
        lines = (run.folder / "weights.txt").read_text().splitlines()
        self.weights = [torch.tensor([float.fromhex(word) for word in line.split()]) for line in dict.fromkeys(lines)]

    @property
    def report(self) -> KnobReport:
        assert "harness_problems" not in self.result.detected, self.result.detected
        return self.result.knobs[KEY]


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that runs gradients.py under the harness. All tests share the run for the same words and options."""
    done: dict[str, Trained] = {}

    def run(words: str, **options: Any) -> Trained:
        chosen = sorted({*words.split()} - {"batch=32"})  # the program's own batch size
        key = json.dumps([chosen, options])
        if key not in done:
            program = Program(name="gradients", argv=(str(PROGRAMS / "gradients.py"), *chosen))
            done[key] = Trained(run_trial(program, tmp_path_factory.mktemp("trained"), forks, **{**PARITY, **options}))
        return done[key]

    return run


QUICK = ["clip", "scaler clip after", "own=2 adam"]
WAYS = ["", "after", "model after", "value model", "closure", "functional", "scaler", "clip momentum"]
MANY = [pytest.param(words, marks=pytest.mark.thorough) for words in WAYS]


@pytest.mark.parametrize("words", [*QUICK, *MANY])
def test_four_accumulated_batches_train_like_one_large_batch(trained: Any, words: str) -> None:
    whole = trained(f"{words} batch=32")
    parts = trained(f"{words} batch=8", knobs={KEY: 4})
    assert (parts.report.status, parts.report.observed) == (APPLIED, 4)
    assert parts.result.detected["num_steps"] == whole.result.detected["num_steps"] == STEPS
    assert parts.result.steps["samples"] == whole.result.steps["samples"]
    if words != "functional":  # the harness cannot see its loss
        assert parts.result.loss["curve"] == pytest.approx(whole.result.loss["curve"], rel=1e-4)
    assert len(whole.weights) == STEPS  # initial ones, and those after each step but the last, in which the trial ends
    for one, other in zip(whole.weights, parts.weights, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("byhand", "clears its gradients by other means than zero_grad()"),
        ("olddata", "clears its gradients by other means than zero_grad()"),
        ("handclip", "changes its gradients itself between backward() and step()"),
        ("private", "changes its gradients itself between backward() and step()"),
        ("assigned", "computes its gradients by other means than backward()"),
        ("chained", "uses the gradients of one backward pass in the next"),
        ("cached", "uses the gradients of one backward pass in the next"),
        ("two", "several optimizers step"),
        ("lbfgs", "the optimizer may call its closure several times a step"),
        ("discards", "throws gradients away between backward() and step()"),
    ],
)
def test_accumulation_is_refused_with_a_reason_in_unsupported_programs(trained: Any, words: str, reason: str) -> None:
    found = trained(f"{words} batch=8", knobs={KEY: 4}).report
    assert found.status == NOT_APPLICABLE
    assert reason in found.reason


def test_accumulation_of_one_batch_changes_nothing(trained: Any) -> None:
    plain, one = trained("clip"), trained("clip", knobs={KEY: 1})
    assert (one.report.status, one.report.observed) == (APPLIED, 1)
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, one.weights, strict=True))
    assert plain.result.loss == one.result.loss


@pytest.mark.parametrize(("words", "every"), [("batch=32", 1), ("batch=16", 2), ("batch=4 clip", 8), ("batch=8 own=2", 2)])
def test_global_batch_is_reached_from_any_batch_size_of_the_program(trained: Any, words: str, every: int) -> None:
    found = trained(words, global_batch=32)
    assert (found.report.status, found.report.observed) == (APPLIED, every)
    assert found.result.observed[KEY] == every
    assert found.result.steps["samples"] == [32.0] * (STEPS - 1)
    reference = trained("batch=32 clip" if "clip" in words else "batch=32")
    assert torch.allclose(found.weights[-1], reference.weights[-1], atol=1e-5)


def test_global_batch_that_cannot_be_reached_is_reported_with_the_reason(trained: Any) -> None:
    found = trained("batch=12", global_batch=32).report
    assert found.status == NOT_APPLICABLE
    uneven = "a step of the program holds 12 samples over all ranks, and train.global_batch=32 is not a multiple of this number"
    assert found.reason == uneven
    found = trained("batch=8", knobs={KEY: 2}, global_batch=32).report
    other = "train.global_batch=32 was requested, but a step holds 16 samples over all ranks"
    assert (found.status, found.reason) == (OVERRIDDEN, other)


def test_baseline_reports_where_gradients_cannot_be_accumulated(trained: Any) -> None:
    assert KEY not in trained("").result.applicability
    assert "several optimizers" in trained("two").result.applicability[KEY]
    assert "closure" in trained("lbfgs").result.applicability[KEY]


SET_TO_NONE = "optimizer.set_to_none"


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("words", ["three", "hooked"])  # three or four optimizers, each of which clears its own parameters
def test_clearing_is_verified_for_each_of_several_optimizers(trained: Any, words: str, asked: bool) -> None:
    report = trained(words, knobs={SET_TO_NONE: asked}).result.knobs[SET_TO_NONE]
    assert (report.status, report.observed) == (APPLIED, asked)


AMP = "precision.amp"


@pytest.mark.parametrize(
    ("words", "every"),
    [("clip batch=16", 1), ("adam batch=8", 2), pytest.param("closure after batch=4", 4, marks=pytest.mark.thorough)],
)
def test_float16_with_scaled_losses_trains_like_float32(trained: Any, words: str, every: int) -> None:
    kept = " ".join(word for word in words.split() if not word.startswith("batch="))
    plain = trained(f"{kept} batch=16", max_steps=12)
    half = trained(words, knobs={AMP: "fp16", KEY: every}, max_steps=12)
    assert (half.result.knobs[AMP].status, half.result.knobs[AMP].observed) == (APPLIED, "fp16")
    assert half.report.status == APPLIED
    assert half.result.scaling["scale"] >= 1024
    assert half.result.scaling["skipped"] <= 4  # steps are skipped until the scale fits
    assert half.result.loss["curve"] == pytest.approx(plain.result.loss["curve"], rel=0.2)
    assert half.result.loss["curve"][0] == pytest.approx(plain.result.loss["curve"][0], rel=1e-2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("handclip", "changes its gradients itself"),
        ("scaler", "scales its gradients itself"),
        ("chained", "uses the gradients of one backward pass in the next"),
        ("cached", "uses the gradients of one backward pass in the next"),
        pytest.param("lbfgs", "may call its closure several times a step", marks=pytest.mark.thorough),
        ("three", "several optimizers step"),
        ("hooked", "several optimizers step"),
        pytest.param("two", "several optimizers step", marks=pytest.mark.thorough),
    ],
)
def test_float16_is_not_applicable_if_losses_cannot_be_scaled(trained: Any, words: str, reason: str) -> None:
    run = trained(words, knobs={AMP: "fp16"})
    found = run.result
    assert found.knobs[AMP].status == NOT_APPLICABLE
    assert reason in found.knobs[AMP].reason
    assert found.loss["is_finite"]
    assert found.loss["last"] < 2  # training continues in float32 from undamaged weights
    assert max(float(weights.abs().max()) for weights in run.weights) < 2


def test_scale_falls_if_the_program_itself_skips_steps_with_infinite_gradients(trained: Any) -> None:
    found = trained("checked large", knobs={AMP: "fp16"}, max_steps=8)
    assert (found.result.status, found.result.knobs[AMP].status) == ("measured", APPLIED)
    assert found.result.scaling["scale"] < 65536  # the scale at the start, with which gradients overflow
    assert found.result.scaling["skipped"] == 0  # the program itself skips these steps
    assert len(found.weights) > 4


def test_norms_of_a_sparse_gradient_change_when_the_program_clears_it() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    before = norms([table.weight])
    table.weight.grad = None
    assert norms([table.weight]) != before


def test_gradients_on_several_gpus_are_divided_by_a_scale_on_one_gpu() -> None:
    with FakeTensorMode():  # tensors that say they are on GPUs
        parameters = [torch.nn.Parameter(torch.ones(2, device=f"cuda:{number}")) for number in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        divide([parameter.grad for parameter in parameters], torch.ones((), device="cuda:1"))
    assert [str(parameter.grad.device) for parameter in parameters if parameter.grad is not None] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("assigned clip", "computes its gradients by other means than backward()"),
        ("assigned two half", "several optimizers step"),  # the first optimizer has no gradients
    ],
)
def test_float16_is_not_applicable_without_a_backward_pass_to_scale(trained: Any, words: str, reason: str) -> None:
    found = trained(words, knobs={AMP: "fp16"}).result
    assert (found.status, found.error) == ("measured", None)
    assert (found.knobs[AMP].status, found.loss) == (NOT_APPLICABLE, None)
    assert reason in found.knobs[AMP].reason


@pytest.mark.parametrize(
    ("words", "knobs"),
    [("skips", {AMP: "fp16"}), ("skips", {KEY: 2}), ("vector checked", {AMP: "fp16", KEY: 2}), ("grad_input", {KEY: 2})],
)
def test_unusual_steps_do_not_disturb_float16_or_accumulation(trained: Any, words: str, knobs: dict[str, Any]) -> None:
    found = trained(words, knobs=knobs, max_steps=12).result
    assert (found.status, found.error) == ("measured", None)
    assert {report.status for report in found.knobs.values()} == {APPLIED}
