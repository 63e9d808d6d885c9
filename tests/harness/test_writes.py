"""Steps without an optimizer of torch.optim: which writes count as steps, and which programs are refused and why."""

from __future__ import annotations

import pytest

from autotune.harness import protocol, writes
from tests.harness.conftest import Trial

FOUND_OUT_IN = 4  # at most this many steps pass before the first one is counted


@pytest.mark.parametrize(
    ("kind", "unit"), [("bare", "steps"), ("adversaries", "samples"), ("renormed", "samples"), ("rebuilt", "samples")]
)
def test_each_update_by_hand_counts_as_one_step(trial: Trial, kind: str, unit: str) -> None:
    run = trial("written.py", kind)
    found = run.result()
    assert (found.status, found.unit, found.detected["optimizers"]) == ("measured", unit, []), run.stderr
    assert found.detected["steps_seen_by"] == writes.WRITTEN
    own = [float(line) for line in (run.folder / "steps.txt").read_text().split()]
    num_models = len(own) // 40 + 1 if kind == "rebuilt" else 1
    assert 0 <= len(own) - found.detected["num_steps"] <= FOUND_OUT_IN * num_models
    assert found.detected["num_steps"] > 20


def test_batches_before_the_first_counted_step_belong_to_no_step(trial: Trial) -> None:
    found = trial("written.py", "loaded", mode="inspect").result()
    assert (set(found.steps["samples"]), found.detected["batches_per_step"]) == ({16.0}, 1.0)


def test_harness_waits_for_a_late_optimizer_step_if_nothing_else_writes(trial: Trial) -> None:
    run = trial("written.py", "gathered")
    found = run.result()
    assert (found.status, found.detected["steps_seen_by"], found.detected["optimizers"]) == ("measured", "", ["SGD"])
    assert found.detected["num_steps"] == pytest.approx(len((run.folder / "steps.txt").read_text().split()), abs=1)


@pytest.mark.parametrize(
    ("kind", "reason"), [("functional", writes.UNSEEN), ("turned", writes.BOTH), ("resting", writes.STILL)]
)
def test_program_whose_steps_cannot_be_counted_is_refused_with_a_remedy(trial: Trial, kind: str, reason: str) -> None:
    found = trial("written.py", kind).result()
    assert found.error == {"type": protocol.UNMEASURABLE, "message": reason, "traceback": ""}
    assert "autotune.trial_step(samples=len(batch))" in reason
