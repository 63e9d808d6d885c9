"""Knobs of a program that shards its modules with FSDP2, in two ranks over gloo.

The program reports which fraction of a parameter a rank holds, and the number of all-gathers in a step.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune import ranks
from autotune.detected import findings
from autotune.harness.knobs.sharding import ShardingKnobs
from autotune.harness.knobs.step import PIPELINE
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from tests.harness.conftest import Run, Trial
from tests.harness.contexts import context

RECIPES = Path(__file__).parents[2] / "autotune" / "programs"
IMPLEMENTATION = "optimizer.implementation"
AMP, STRATEGY, RESHARD = "precision.amp", "parallel.strategy", "parallel.reshard_after_forward"
SHARDS = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6 and older: FSDP2 needs a GPU")
# All-gathers in a step: one (KEPT) or two (AGAIN) for each of three blocks, and one for the parameters outside the blocks.
KEPT, AGAIN = 4, 7


def seen(run: Run, rank: int = 0) -> dict[str, Any]:
    """Returns what a rank reported."""
    return dict(json.loads((run.folder / f"seen{rank}.json").read_text()))


@SHARDS
@pytest.mark.parametrize(("asked", "gathers"), [(None, AGAIN), (False, KEPT)])
def test_parameters_are_kept_or_gathered_again_as_asked(trial: Trial, asked: bool | None, gathers: int) -> None:
    run = trial("sharded.py", ranks=2, knobs={} if asked is None else {RESHARD: asked}, mode="inspect")
    for rank in (0, 1):
        found, told = run.result(rank), seen(run, rank)
        assert (told["gathers"], told["share"]) == (gathers, 0.5)
        assert (found.observed[STRATEGY], found.observed[RESHARD]) == ("fsdp", asked is None)
        assert RESHARD not in found.applicability
        assert "{parallel.strategy=ddp}" in found.applicability[STRATEGY]
        assert "contiguous" not in str(found.applicability)  # the model has no convolutions
        assert "DistributedDataParallel" in found.applicability["parallel.bucket_cap_mb"]
        assert asked is None or (found.knobs[RESHARD].status, found.knobs[RESHARD].observed) == (APPLIED, asked)


@SHARDS
def test_knob_reshards_parameters_that_the_program_would_keep(trial: Trial) -> None:
    run = trial("sharded.py", "own=false", ranks=2, knobs={RESHARD: True}, mode="inspect")
    assert (seen(run)["gathers"], run.result().knobs[RESHARD].status) == (AGAIN, APPLIED)


@SHARDS
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("word", "status", "why"),
    [
        ("one", NOT_APPLICABLE, "sharded as a single unit"),
        ("ddp", NOT_APPLICABLE, "no module is sharded"),
        ("again", OVERRIDDEN, "3 of 3 sharded modules have another value"),
        ("loose", APPLIED, ""),
    ],
)
def test_reshard_after_forward_is_reported_with_the_reason_if_it_has_no_effect(
    trial: Trial, word: str, status: str, why: str
) -> None:
    found = trial("sharded.py", word, ranks=2, knobs={RESHARD: False}, mode="inspect").result()
    assert found.knobs[RESHARD].status == status
    assert why in found.knobs[RESHARD].reason


@SHARDS
@pytest.mark.parametrize(("asked", "share"), [("fsdp", 0.5), pytest.param("ddp", 1.0, marks=pytest.mark.thorough)])
def test_strategy_that_is_passed_to_the_program_is_read_back(trial: Trial, asked: str, share: float) -> None:
    run = trial("sharded.py", "--strategy", asked, ranks=2, passed={STRATEGY: asked}, mode="inspect")
    for rank in (0, 1):
        found = run.result(rank)
        assert (found.knobs[STRATEGY].status, found.knobs[STRATEGY].observed) == (APPLIED, asked)
        assert not any(key.startswith("parallel.") for key in found.applicability)
        assert seen(run, rank)["share"] == share


def test_a_strategy_that_the_program_does_not_follow_is_overridden(trial: Trial) -> None:
    found = trial("sharded.py", "ddp", ranks=2, passed={STRATEGY: "fsdp"}, mode="inspect").result()
    assert (found.knobs[STRATEGY].status, found.knobs[STRATEGY].observed) == (OVERRIDDEN, "ddp")


@SHARDS
def test_sharded_model_with_other_knobs_has_the_same_losses_as_with_ddp(trial: Trial) -> None:
    knobs = {"memory.activation_checkpointing": True, "optimizer.implementation": "foreach", RESHARD: True}
    shares = trial("sharded.py", ranks=2, knobs=knobs, mode="parity", seed=3, max_steps=6)
    whole = trial("sharded.py", "ddp", ranks=2, mode="parity", seed=3, max_steps=6)
    assert {key: report.status for key, report in shares.result().knobs.items()} == dict.fromkeys(knobs, APPLIED)
    assert seen(shares)["losses"] == pytest.approx(seen(whole)["losses"], rel=1e-5)


@SHARDS
def test_a_sharded_model_may_be_moved_between_steps(trial: Trial) -> None:
    run = trial("sharded.py", "moved", ranks=2, mode="inspect")
    assert [run.result(rank).status for rank in (0, 1)] == ["measured"] * 2, run.result().error


@SHARDS
def test_a_policy_that_computes_in_bf16_counts_as_the_precision_of_the_program(trial: Trial) -> None:
    found = trial("sharded.py", "half", ranks=2, mode="inspect").result()
    assert found.observed[AMP] == "bf16"
    assert dict(findings(found))["precision"] == "fp32 parameters, computed in bf16 by a policy, no autocast, not compiled"
    assert "mixed-precision policy (FSDP) computes in bf16" in found.applicability[AMP]
    report = trial("sharded.py", "half", ranks=2, knobs={AMP: "bf16"}, mode="inspect").result().knobs[AMP]
    assert (report.status, report.observed) == (NOT_APPLICABLE, "bf16")


@SHARDS
@pytest.mark.parametrize(("word", "shared"), [("tensor", 2), ("fsdp", 1), pytest.param("ddp", 1, marks=pytest.mark.thorough)])
def test_a_batch_of_ranks_that_hold_parts_of_one_model_counts_once(trial: Trial, word: str, shared: int) -> None:
    run = trial("sharded.py", word, ranks=2, global_batch=16, knobs={IMPLEMENTATION: "foreach"})
    results = [run.result(rank) for rank in (0, 1)]
    assert ("distributed tensors beside others" in results[0].knobs[IMPLEMENTATION].reason) == (word == "tensor")
    assert {result.ranks_per_batch for result in results} == {shared}
    report = results[0].knobs["step.accumulation"]
    assert (report.status, report.observed) == (APPLIED, shared)  # a rank's batch has 8 samples
    rates = [pace.samples / pace.step_s for result in results if (pace := ranks.pace(result, results[0]))]
    rate = ranks.rate_per_s(results)
    assert rate is not None
    assert rate == pytest.approx(2 * min(rates) / shared)


@SHARDS
def test_stages_of_a_pipeline_share_a_batch_and_do_not_accumulate(trial: Trial) -> None:
    run = trial("staged.py", ranks=2, knobs={"step.accumulation": 2})
    results = [run.result(rank) for rank in (0, 1)]
    assert {result.ranks_per_batch for result in results} == {2}
    for result in results:
        report = result.knobs["step.accumulation"]
        assert (report.status, report.reason) == (NOT_APPLICABLE, PIPELINE)
    first = ranks.pace(results[0], results[0])
    assert first is not None
    assert first.samples == 16


def test_modules_that_raise_on_unknown_attributes_are_tolerated() -> None:
    class Strict(torch.nn.Linear):
        def __getattr__(self, name: str) -> Any:
            if name == "sharding_strategy":
                raise KeyError(name)
            return super().__getattr__(name)

    sharding = ShardingKnobs(context())
    sharding.meet(torch.nn.Sequential(Strict(2, 2)))
    assert not sharding.is_found


TABLE = ("tabular.py", "--num-layers", "2", "--hidden-size", "32", "--samples-per-epoch", "640", "--batch-size", "8")
IMAGES = ("vision.py", "--model", "resnet18", "--image-size", "32", "--data", "synthetic", "--batch-size", "4")
TEXT = (
    *("text.py", "--model", "gpt2_small", "--num-layers", "2", "--hidden-size", "64", "--vocab-size", "500"),
    *("--data", "synthetic", "--sequence-length", "16", "--batch-size", "4"),
)


@SHARDS
@pytest.mark.parametrize("words", [TABLE, *(pytest.param(words, marks=pytest.mark.thorough) for words in (IMAGES, TEXT))])
def test_recipe_has_the_same_losses_with_fsdp_as_with_ddp(trial: Trial, words: tuple[str, ...]) -> None:
    curves = []
    for strategy in ("ddp", "fsdp"):
        command = (str(RECIPES / words[0]), *words[1:], "--device", "cpu", "--strategy", strategy)
        found = trial(*command, ranks=2, passed={STRATEGY: strategy}, mode="parity", seed=3, max_steps=4).result()
        assert (found.knobs[STRATEGY].status, found.observed[STRATEGY]) == (APPLIED, strategy)
        assert found.observed.get(RESHARD) == (True if strategy == "fsdp" else None)
        curves.append(found.loss["curve"])
    assert len(curves[0]) >= 4
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)
