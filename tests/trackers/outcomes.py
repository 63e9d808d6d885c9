"""A study with every outcome that MLflow's pages must distinguish."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from autotune.records import Outcome
from autotune.run_dir import StudyFolder
from tests.study.conftest import Bench
from tests.support.fake_launcher import OUT_OF_MEMORY, Failure, Surface

WANTED = {
    Outcome.ok, Outcome.raced, Outcome.unsteady, Outcome.device_oom, Outcome.crash, Outcome.timeout, Outcome.infeasible,
}  # fmt: skip
SPACE = """
loader.batch_size: [32, 64, 128]
loader.num_workers: [0, 2]
precision.amp: ['off', 'bf16']
layout.channels_last: [false, true]
optimizer.implementation: ['default', 'fused']
"""
GAINS = {("precision.amp", "bf16"): 2.3, ("layout.channels_last", True): 1.2, ("optimizer.implementation", "fused"): 0.6}
FAILURES = {
    2: dataclasses.replace(OUT_OF_MEMORY, log_tail="torch.OutOfMemoryError: CUDA out of memory."),
    3: Failure(signal="SIGSEGV", cause="exit", log_tail="Segmentation fault"),
    4: Failure(cause="deadline"),
    5: Failure(is_unsteady=True),
}


def make_study_of_every_outcome(runs: Path) -> StudyFolder:
    """Runs the study on the fake launcher; asserts that every outcome occurs."""
    space = runs.parent / "space.yaml"
    space.write_text(SPACE)
    surface = Surface(
        gains=GAINS,
        step_s=lambda knobs: 0.5 if knobs["loader.batch_size"] == 128 else 0.1,
        failures=lambda trial, knobs: FAILURES.get(trial),
        power_w=lambda knobs: 300.0,
    )
    limits = ("constraints.max_step_p95_s=0.3", "study.budget.trials=11")
    study = Bench(runs, surface, f"search_space={space}", *limits, minutes=5, is_kept=True)
    study.run()
    missing = WANTED - {trial.outcome for trial in study.trials}
    assert not missing, missing
    return study.folder
