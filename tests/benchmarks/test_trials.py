"""The bench measures a real program through the real launcher and harness."""

import sys
from pathlib import Path

import pytest

from autotune.config.compose import compose
from autotune.harness.protocol import MeasureRules
from autotune.launchers.local import LocalLauncher
from autotune.records import Outcome
from tests.benchmarks.trials import Bench

STEP_PROGRAM = Path(__file__).with_name("step_program.py")
SHORT = MeasureRules(warmup_min_device_s=0.1, warmup_max_s=2.0, min_s=0.3, max_s=1.0)


@pytest.mark.thorough
def test_baseline_reports_observed_knobs_and_a_changed_knob_takes_effect(tmp_path: Path) -> None:
    command, launcher = [sys.executable, str(STEP_PROGRAM), "--device", "cpu"], LocalLauncher()
    bench = Bench(compose([], command=command).command, launcher, tmp_path)
    try:
        baseline = bench.measure({}, SHORT)
        assert baseline.rate_per_s is not None, baseline.reason
        assert bench.observed["optimizer.implementation"] == "default"
        changed = bench.measure({"optimizer.implementation": "fused"}, SHORT)
    finally:
        launcher.close()
    assert changed.outcome in {Outcome.ok, Outcome.unsteady}
    assert changed.not_applied == {}


@pytest.mark.thorough
def test_warm_and_fresh_trials_reuse_the_compile_cache_of_the_study(tmp_path: Path) -> None:
    command = [sys.executable, str(STEP_PROGRAM), "--device", "cpu", "--blocks", "1000"]
    launcher = LocalLauncher()
    bench = Bench(compose([], command=command).command, launcher, tmp_path / "study" / "trials")
    try:
        assert bench.measure({}, SHORT).rate_per_s is not None
        found = [bench.measure({"compile.mode": "default"}, SHORT, warm=warm) for warm in (("torch",), ("torch",), ())]
    finally:
        launcher.close()
    assert [trial.start for trial in found] == ["warm", "warm", "fresh"]
    assert [trial.result.compiled["graphs"] for trial in found if trial.result] == [1, 1, 1]
    assert [trial.result.compiled["cached"] > 0 for trial in found if trial.result] == [False, True, True]
