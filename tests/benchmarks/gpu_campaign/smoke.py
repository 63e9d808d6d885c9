"""Stage `smoke`: does everything that only a GPU can show work at all? A few minutes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

from autotune.config.compose import compose
from autotune.harness.protocol import APPLIED, MeasureRules
from autotune.launchers.local import LocalLauncher
from autotune.records import Knobs, Outcome
from autotune.run_dir import StudyFolder
from tests.benchmarks.gpu_campaign.checks import Check
from tests.benchmarks.trials import Bench, Measured

SHORT = MeasureRules(min_s=1.0, max_s=5.0, slow_max_s=5.0)
CLOCK_GAP_FRAC = 0.01
STUDY_MINUTES = 2

# One changed value for every knob that could behave otherwise on a GPU; the text is what a CPU cannot tell of it.
KNOBS: list[tuple[Knobs, str]] = [
    ({"precision.amp": "bf16"}, ""),
    ({"layout.channels_last": True}, ""),
    ({"optimizer.implementation": "fused"}, ""),
    ({"loader.num_workers": 2}, ""),
    ({"loader.num_workers": 2, "loader.pin_memory": True}, "page-locked memory"),
    ({"precision.matmul": "high"}, "TF32 on Tensor Cores"),
    ({"backend.cudnn_benchmark": True}, "cuDNN's choice of kernels"),
    ({"compile.mode": "default"}, ""),
    ({"compile.mode": "reduce-overhead"}, "CUDA graphs"),
]


def bench(place: Path, *overrides: str) -> Bench:
    """Returns a bench for resnet18 on the small images of fake_cifar."""
    return Bench(compose(["model=resnet18", "data=fake_cifar", *overrides], command=None).command, LocalLauncher(), place)


def baseline_is_measured(place: Path) -> str:
    """Checks that the recipe gives a rate as it is."""
    return _described(_worked(bench(place).measure({}, SHORT)))


def knob_is_applied(knobs: Knobs, place: Path) -> str:
    """Checks that knobs take effect and the program still trains."""
    place_bench = bench(place)
    _worked(place_bench.measure({}, SHORT))
    measured = _worked(place_bench.measure(knobs, SHORT))
    assert measured.result
    statuses = {key: report.status for key, report in measured.result.knobs.items()}
    assert set(statuses.values()) <= {APPLIED}, f"{measured.not_applied}"
    return _described(measured)


def clocks_agree(place: Path) -> str:
    """Checks that device events and wall time tell the same window."""
    measured = _worked(bench(place).measure({}, SHORT))
    assert measured.result
    assert measured.result.window
    gap_frac = measured.result.window.clock_gap_frac
    assert gap_frac is not None, "no device events were read"
    assert gap_frac <= CLOCK_GAP_FRAC, f"gap of {gap_frac:.2%}"
    return f"gap {gap_frac:.3%}"


def oversized_batch_is_named(place: Path) -> str:
    """Checks that a batch that cannot fit ends as device_oom, not as an error."""
    place_bench = bench(place)
    _worked(place_bench.measure({}, SHORT))
    measured = place_bench.measure({"loader.batch_size": 65536}, SHORT)
    assert measured.outcome is Outcome.device_oom, f"{measured.outcome}: {measured.reason}"
    return measured.reason


def study_reaches_its_verdict(place: Path) -> str:
    """Checks that the main command works from end to end."""
    overrides = ["model=resnet18", f"study.budget.minutes={STUDY_MINUTES}", "study.name=smoke", f"runs_dir={place}"]
    _command("-m", "autotune", "run", *overrides)
    summary = StudyFolder(place / "smoke").read_summary()
    assert summary["status"] == "complete", summary["reason"]
    return f"{summary['speedup']}, {summary['best'] and summary['best']['overrides']}, outcomes {summary['counts']}"


def energy_is_counted(place: Path) -> str:
    """Checks that a study of energy reads joules, and that a limit of power which nothing keeps is read and broken."""
    overrides = ["model=resnet18", "data=fake_cifar", "objective=[energy_per_sample,throughput]", f"runs_dir={place}"]
    _command("-m", "autotune", "run", *overrides, "study.name=energy", f"study.budget.minutes={STUDY_MINUTES}")
    summary = StudyFolder(place / "energy").read_summary()
    values = [trial["objectives"] for trial in summary["trials"] if trial["outcome"] == "ok"]
    assert all(value.get("energy_per_sample", 0) > 0 for value in values), f"{values}"
    limits = ["study.budget.trials=2", "constraints.max_power_w=1", "study.name=power", "study.budget.minutes=1"]
    _command("-m", "autotune", "run", *overrides, *limits)
    outcomes = StudyFolder(place / "power").read_summary()["counts"]
    assert "ok" not in outcomes, f"{outcomes}"
    return f"{summary['baseline']['objectives']} -> {summary['best']['objectives']}; power: {outcomes}"


def doctor_sees_the_gpus(_: Path) -> str:
    """Checks that the real driver answers doctor's questions: what a stand-in cannot tell is which of them it knows."""
    document = json.loads(_command("-m", "autotune", "doctor", "--json"))
    found = {finding["name"]: finding for finding in document["findings"]}
    unknown = [name for name in ("driver", "persistence mode", "clocks", "power cap") if found[name]["status"] == "not here"]
    assert not unknown, f"{unknown}"
    assert found["torch"]["status"] == "fine", found["torch"]["found"]
    return f"{found['driver']['found']}; {found['clocks']['found']}; {found['power cap']['found']}; {document['seconds']}"


def gpu_tests_pass(_: Path) -> str:
    """Checks that the tests marked `gpu` pass."""
    return re.sub(r"\s+", " ", _command("-m", "pytest", "-m", "gpu").strip().splitlines()[-1])


def _command(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}: {(done.stdout + done.stderr)[-600:]}"
    return done.stdout


def _worked(measured: Measured) -> Measured:
    assert measured.rate_per_s is not None, f"{measured.outcome}: {measured.reason}"
    return measured


def _described(measured: Measured) -> str:
    return f"{measured.rate_per_s:.1f} samples/s, {measured.outcome}, {measured.seconds:.0f} s"


CHECKS = [
    Check(name="the baseline is measured", run=baseline_is_measured),
    *(
        Check(
            name="works: " + " ".join(f"{key}={value}" for key, value in knobs.items()),
            run=partial(knob_is_applied, knobs),
            needs_cuda=misses,
        )
        for knobs, misses in KNOBS
    ),
    Check(name="device events agree with wall time", run=clocks_agree, needs_cuda="CUDA events"),
    Check(name="a batch too large is device_oom", run=oversized_batch_is_named, needs_cuda="the CUDA allocator's own limit"),
    Check(name="the main command reaches its verdict", run=study_reaches_its_verdict),
    Check(name="energy and power are measured", run=energy_is_counted, needs_cuda="NVML's energy counter and power reading"),
    Check(name="doctor sees the GPUs", run=doctor_sees_the_gpus, needs_cuda="what a real driver tells of clocks and power"),
    Check(name="the tests marked gpu pass", run=gpu_tests_pass, needs_cuda="every test with that marker"),
]
