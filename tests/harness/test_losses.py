"""One loss is kept per step, whatever the program does between two steps, and the same seed gives the same losses."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.harness import losses
from autotune.harness.losses import LossWatch
from tests.harness.conftest import RULES, SCRIPTS, Run, Trial
from tests.harness.contexts import context

PARITY: dict[str, Any] = {"mode": "parity", "seed": 7, "max_steps": 12}


def curve(run: Run, rank: int = 0) -> list[Any]:
    loss = run.result(rank).loss
    assert loss is not None
    assert loss["why_no_curve"] == ""
    return list(loss["curve"])


@pytest.mark.thorough
def test_parity_run_ends_after_its_steps_and_is_reproducible_under_one_seed(trial: Trial) -> None:
    run = trial("unseeded.py", **PARITY)
    found = run.result()
    assert (run.returncode, found.status, found.window, found.detected["num_steps"]) == (0, "measured", None, 12)
    told = [float(line) for line in (run.folder / "losses.txt").read_text().split()]
    assert curve(run)[:11] == pytest.approx(told[:11])
    assert len(curve(run)) == 12
    again, other = (curve(trial("unseeded.py", **{**PARITY, "seed": seed})) for seed in (7, 8))
    assert curve(run) == again
    assert curve(run) != other


@pytest.mark.thorough
def test_a_parity_run_of_slow_steps_ends_when_its_time_is_up(trial: Trial) -> None:
    found = trial("basic.py", "sleep=0.05", **{**PARITY, "max_steps": 1000, "max_s": 0.01}).result()
    assert 8 <= found.detected["num_steps"] <= 10


@pytest.mark.thorough
def test_a_measured_trial_keeps_the_first_losses_only(trial: Trial) -> None:
    run = trial("unseeded.py", rules=dataclasses.replace(RULES, min_steps=100, max_s=10.0))
    told = [float(line) for line in (run.folder / "losses.txt").read_text().split()]
    assert len(told) > losses.MAX_LOSSES
    assert curve(run) == pytest.approx(told[: losses.MAX_LOSSES - 1])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gan", "closure"])
def test_a_step_has_one_loss_however_often_backward_is_called(trial: Trial, kind: str) -> None:
    found = curve(trial(f"{SCRIPTS}/{kind}.py", **PARITY))
    assert len(found) == 12
    assert all(math.isfinite(loss) for loss in found)
    if kind == "closure":  # each step begins at the loss that the last one has reached
        assert found[-1] < found[0]


def test_loss_of_a_tensor_subclass_is_kept_once(trial: Trial) -> None:
    found = curve(trial("kinds.py", "tensors_of_its_own", **PARITY))
    assert len(found) == 12
    assert max(found) < 2 * min(found)


def test_scaled_loss_is_kept_without_its_scale(trial: Trial) -> None:
    found = curve(trial("kinds.py", "scaler", **PARITY))
    assert len(found) == 5
    assert [loss is None for loss in found] == [False, True, False, True, False]
    assert all(loss < 4 for loss in found if loss is not None)  # a loss that is still scaled would exceed 4


def test_program_that_hides_its_loss_has_no_losses_in_its_result(trial: Trial) -> None:
    assert trial("unseeded.py", "backward=functional", **PARITY).result().loss is None


@pytest.mark.thorough
def test_every_rank_keeps_its_own_losses_and_all_ranks_end_together(trial: Trial) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    run = trial(f"{SCRIPTS}/ddp.py", argv=words, **PARITY)
    assert run.returncode == 0, run.stderr
    both = [curve(run, rank) for rank in (0, 1)]
    assert [len(one) for one in both] == [12, 12]
    assert both[0] != both[1]


def test_a_loss_whose_memory_the_next_step_reuses_keeps_its_value() -> None:
    optimizers = SimpleNamespace(is_stepping=False, scaler=None)
    watch = LossWatch(context(device="cpu", optimizers=optimizers, gradients=SimpleNamespace(scaler=None)))
    for patch in watch._patches:
        patch.uninstall()
    loss = torch.ones((), requires_grad=True) * 2
    watch._see(loss)
    loss.data.fill_(float("nan"))  # torch.compile's CUDA graphs overwrite a module's output like this
    found = watch.summary()
    assert found is not None
    assert (found["first"], found["last"]) == (2.0, 2.0)
