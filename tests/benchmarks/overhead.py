"""Measures what autotune itself costs: a step, a trial, and the record of a trial.

    python -m tests.benchmarks.overhead [--pairs 10] [--trials 6]

1. A program of about one millisecond a step that times itself, with the harness (no knobs, measuring all the time, heartbeat
   included) and without it, in alternating fresh processes; compared pair by pair.
2. A small study: seconds of each trial outside warm-up and window, by phase, and the tuner's own seconds between trials.
3. `autotune sync` of that study, once with its first trial and once with all: the difference is what one trial costs the
   tracker. It runs beside the study at the lowest priority and is not part of a trial's time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from autotune import stats
from autotune.config.compose import compose
from autotune.harness.protocol import STDOUT_FILE, MeasureRules
from autotune.launchers.local import LocalLauncher
from autotune.records import TrialRecord
from autotune.run_dir import StudyFolder
from tests.benchmarks.reporting import machine_lines, table
from tests.benchmarks.trials import Bench

STEP_PROGRAM = Path(__file__).with_name("step_program.py")
GOAL_US = 10.0  # 1 % of a millisecond
NEVER = 10**9
MEASURE_TO_THE_END = MeasureRules(min_steps=NEVER, min_s=NEVER, max_s=NEVER, slow_min_steps=NEVER, slow_max_s=NEVER)
MEASURED_PHASES = ("warmup", "steady")


@dataclass(kw_only=True)
class StepCost:
    """Median over blocks of the mean step, of each fresh process; pairs ran next to each other in time."""

    without_us: list[float]
    with_us: list[float]

    @property
    def differences_us(self) -> list[float]:
        """With minus without, pair by pair."""
        return [a - b for a, b in zip(self.with_us, self.without_us, strict=True)]


def step_cost(num_pairs: int, num_blocks: int) -> StepCost:
    """Returns what a step takes with the harness and without it, order ABBA."""
    command = [sys.executable, str(STEP_PROGRAM), "--blocks", str(num_blocks)]
    cost = StepCost(without_us=[], with_us=[])
    with tempfile.TemporaryDirectory(prefix="overhead-") as place:
        bench = Bench(compose([], command=command).command, LocalLauncher(), Path(place))
        for pair in range(num_pairs):
            both = [(cost.without_us, lambda: _plain(command)), (cost.with_us, lambda: _harnessed(bench))]
            for values, run in both if pair % 2 == 0 else reversed(both):
                values.append(run())
            print(f"pair {pair + 1}: without {cost.without_us[-1]:.1f} us, with {cost.with_us[-1]:.1f} us", flush=True)
    return cost


def _plain(command: list[str]) -> float:
    return _step_us(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _harnessed(bench: Bench) -> float:
    measured = bench.measure({}, MEASURE_TO_THE_END)
    if measured.result is None or measured.result.status != "ended":
        raise SystemExit(f"the step program was to be measured to its own end: {measured.outcome}: {measured.reason}")
    return _step_us((bench.last_folder / STDOUT_FILE).read_text())


def _step_us(stdout: str) -> float:
    line = next(line for line in stdout.splitlines() if line.startswith('{"step_s"'))
    return statistics.median(json.loads(line)["step_s"]) * 1e6


def small_study(num_trials: int, runs: Path) -> list[TrialRecord]:
    """Returns the trials of a study of the step program."""
    overrides = ["study.name=overhead", f"study.budget.trials={num_trials}", f"runs_dir={runs}"]
    program = [sys.executable, str(STEP_PROGRAM), "--blocks", "1000"]
    subprocess.run([sys.executable, "-m", "autotune", "run", *overrides, "--", *program], check=True, stdout=subprocess.DEVNULL)
    return StudyFolder(runs / "overhead").read_trials()


def trial_costs(trials: list[TrialRecord]) -> list[tuple[str, str]]:
    """Returns where the seconds of a trial go, median over trials, and what lies between two trials."""
    measured = [trial for trial in trials if trial.value is not None]
    outside = [t.seconds - sum(t.phases_s.get(phase, 0.0) for phase in MEASURED_PHASES) for t in measured]
    gaps = [b.started_at - a.started_at - a.seconds for a, b in itertools.pairwise(trials)]
    phases = [phase for phase in measured[0].phases_s if phase not in MEASURED_PHASES]
    rows = [("outside warm-up and window", outside)]
    rows += [(f"  of it, {phase}", [trial.phases_s.get(phase, 0.0) for trial in measured]) for phase in phases]
    rows += [("warm-up and window", [t.seconds - o for t, o in zip(measured, outside, strict=True)])]
    rows += [("between two trials", gaps or [0.0])]
    return [(name, f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})") for name, values in rows]


def tracker_cost(runs: Path, num_trials: int) -> tuple[float, float]:
    """Returns seconds of a sync per trial, and seconds it takes before the first (imports, a new store)."""
    few = 1
    seconds: dict[int, float] = {}
    for count in (few, num_trials):
        place = runs.parent / f"sync-{count}"
        shutil.copytree(runs / "overhead", place / "overhead")
        for folder in sorted((place / "overhead" / "trials").iterdir())[count:]:
            shutil.rmtree(folder)
        started_s = time.monotonic()
        subprocess.run([sys.executable, "-m", "autotune", "sync", "overhead", f"runs_dir={place}"], check=True)
        seconds[count] = time.monotonic() - started_s
    per_trial = (seconds[num_trials] - seconds[few]) / (num_trials - few)
    return per_trial, seconds[few] - per_trial * few


def main() -> int:
    """Measures and prints; returns 1 when a step costs more than the goal."""
    parser = argparse.ArgumentParser(description="what autotune itself costs")
    parser.add_argument("--pairs", type=int, default=10, help="fresh processes with and without the harness")
    parser.add_argument("--blocks", type=int, default=10, help="blocks of 400 steps in each")
    parser.add_argument("--trials", type=int, default=6, help="trials of the small study; 0 leaves out parts 2 and 3")
    options = parser.parse_args()
    cost = step_cost(options.pairs, options.blocks)
    mean_us = statistics.fmean(cost.differences_us)
    half_us = stats.half_width(cost.differences_us)
    rows = [
        ("step without the harness", f"{statistics.median(cost.without_us):.1f} us"),
        ("step with it", f"{statistics.median(cost.with_us):.1f} us"),
        ("cost of a step", f"{mean_us:.2f} us, 95 % interval +-{half_us or float('nan'):.2f} us"),
        (
            "  of a step of 1 ms",
            f"{mean_us / 10:.2f} %, pairs from {min(cost.differences_us):.1f} to {max(cost.differences_us):.1f} us",
        ),
    ]
    if options.trials:
        with tempfile.TemporaryDirectory(prefix="overhead-") as place:
            trials = small_study(options.trials, Path(place) / "runs")
            rows += trial_costs(trials)
            per_trial_s, first_s = tracker_cost(Path(place) / "runs", len(trials))
        rows += [
            ("tracker, each trial", f"{per_trial_s:.3f} s"),
            ("tracker, once a study", f"{first_s:.1f} s, beside the first trial"),
        ]
    print("\n" + table(("what", "cost"), rows))
    print(f"n = {options.pairs} pairs of fresh processes, {options.blocks} blocks of 400 steps each, ABBA")
    print("\n".join(machine_lines()))
    is_reached = mean_us <= GOAL_US
    print(f"goal      at most {GOAL_US:.0f} us a step: {'reached' if is_reached else 'MISSED'}")
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
