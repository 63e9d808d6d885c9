"""An error that poisons the CUDA context is recognised and ends only its own trial; device and study carry on."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.harness.protocol import STDERR_FILE
from autotune.records import Outcome
from autotune.run_dir import StudyFolder
from autotune.trials.quarantine import PROBE, STICKY
from tests.benchmarks.commands import run_study
from tests.gpu.conftest import Make

pytestmark = pytest.mark.gpu
BREAKING = Path(__file__).with_name("breaking_program.py")


def test_poisoned_context_is_recognised_and_the_next_trial_works(
    program: Make, record_property: Callable[[str, object], None]
) -> None:
    trials = program("--batch", "{loader.batch_size=64}", file=BREAKING)
    broken = trials.measure({"loader.batch_size": 256})
    record_property("reason", broken.reason)
    assert broken.outcome in (Outcome.error, Outcome.crash)
    assert STICKY.search(broken.reason + (trials.bench.last_folder / STDERR_FILE).read_text())
    trials.works({"loader.batch_size": 96})
    probed = subprocess.run([sys.executable, "-c", PROBE, "cuda"], capture_output=True, text=True)
    assert probed.returncode == 0, probed.stderr


def test_study_completes_despite_trials_that_poison_the_context(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    command = [sys.executable, str(BREAKING), "--batch", "{loader.batch_size=64}"]
    overrides = ["search_space=none", "loader.batch_size=choice(64,96,256,512)", "study.budget.trials=3", "search.sampler=grid"]
    summary = run_study(tmp_path, "sticky", overrides, minutes=1.0, command=command)
    record_property("outcomes", summary["counts"])
    assert summary["status"] == "complete"
    broken = [trial for trial in StudyFolder(tmp_path / "sticky").read_trials() if trial.knobs["loader.batch_size"] >= 128]
    assert broken
    assert {trial.outcome for trial in broken} <= {Outcome.error, Outcome.crash}
    assert not summary["best"] or summary["best"]["knobs"]["loader.batch_size"] < 128
