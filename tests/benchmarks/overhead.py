"""Measures what autotune itself costs in a step, in a trial, and for tracking a trial.

    python -m tests.benchmarks.overhead [--processes 3] [--pairs 6] [--trials 6]

1. A program with steps of about one millisecond times itself, with the harness (no knobs, measuring all the time, heartbeats
   included) and without it. The harness's cost is measured in three ways. The time spent in its own code, as a share of the
   step, is precise. The difference between steps with and without the harness, block by block in one process, covers the whole
   step but is noisier. The same difference between fresh processes covers everything but is the noisiest.
2. A small study shows the seconds of each trial outside warm-up and window, by phase, and the tuner's time between trials.
3. `autotune sync` mirrors that study once with new trials and once without. The difference is what one trial costs the
   tracker. The tracker runs in parallel with the study at the lowest priority, so its time is not part of a trial's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.config.compose import compose
from autotune.harness.protocol import STDERR_FILE, STDOUT_FILE, MeasureRules
from autotune.launchers.local import LocalLauncher
from autotune.records import TrialRecord
from autotune.run_dir import StudyFolder
from tests.benchmarks.reporting import machine_lines, table
from tests.benchmarks.trials import Bench

STEP_PROGRAM = Path(__file__).with_name("step_program.py")
TOGGLE_PROGRAM = Path(__file__).with_name("step_toggle.py")
BLOCK_STEPS = 200
GOAL_US = 10.0  # maximum own time in a step: 1 % of a millisecond
NEVER = 10**9
MEASURE_TO_THE_END = MeasureRules(min_steps=NEVER, min_s=NEVER, max_s=NEVER, slow_min_steps=NEVER, slow_max_s=NEVER)
STUDY_MINUTES = 3  # more than the few trials need
LEAST_TRIALS = 2  # one for the tracker's first sync, and at least one more to time
MEASURED_PHASES = ("warmup", "steady")


@dataclass(kw_only=True)
class StepCost:
    """Microseconds of a step with the harness and without it, in pairs that were measured right after each other."""

    with_us: list[float] = field(default_factory=list)
    without_us: list[float] = field(default_factory=list)
    own_frac: list[float] = field(default_factory=list)  # share of each block's time that was spent in the harness's own code

    @property
    def differences_us(self) -> list[float]:
        """Time with the harness minus time without it, for each pair."""
        return [a - b for a, b in zip(self.with_us, self.without_us, strict=True)]

    @property
    def median_us(self) -> float:
        """The median difference; not the mean, because other programs make some blocks much slower."""
        return statistics.median(self.differences_us)

    def words(self) -> str:
        """Returns the median difference and its 95 % interval, from order statistics, which assume no distribution."""
        import scipy.stats  # not at the top: it takes a second, also in the tests

        low_us, high_us = scipy.stats.quantile_test(self.differences_us, p=0.5).confidence_interval()
        interval = "too few for an interval" if math.isnan(low_us) else f"{low_us:.1f} to {high_us:.1f}"
        return f"{self.median_us:.1f} us ({interval}, n = {len(self.with_us)})"

    @property
    def own_us(self) -> float:
        """The harness's own time in a step: its median share of a step of this program on this machine, in microseconds."""
        return statistics.median(self.own_frac) * statistics.median(self.with_us)

    def own_words(self) -> str:
        """Returns the harness's own share of a step: median, 10th and 90th percentile over the blocks."""
        low, *_, high = statistics.quantiles(self.own_frac, n=10)
        return f"{statistics.median(self.own_frac):.2%} of a step ({low:.2%} to {high:.2%}, n = {len(self.own_frac)})"


def cost_in_one_process(num_processes: int, num_blocks: int, num_steps: int = BLOCK_STEPS) -> tuple[StepCost, StepCost, int]:
    """Alternates blocks of `num_steps` with and without the harness in one process; needs two blocks or more.

    Returns:
        What the harness costs a step, the same difference between blocks without the harness (the control), and how many of
        the harness's functions a step calls.
    """
    cost, control, num_calls = StepCost(), StepCost(), 0
    command = [sys.executable, str(TOGGLE_PROGRAM), "--blocks", str(num_blocks), "--steps", str(num_steps)]
    with tempfile.TemporaryDirectory(prefix="overhead-") as place:
        bench = Bench(compose([], command=command).command, LocalLauncher(), Path(place))
        for _ in range(num_processes):
            seen = _to_the_end(bench)
            cost.with_us += [step_s * 1e6 for step_s in seen["with_s"]]
            cost.without_us += [step_s * 1e6 for step_s in seen["without_s"]]
            control.with_us += [step_s * 1e6 for step_s in seen["control_s"]]
            cost.own_frac += seen["own_frac"]
            num_calls = seen["num_calls"]
            print(f"one process: own time {cost.own_words()}; with minus without {cost.words()}", flush=True)
    control.without_us = cost.without_us
    return cost, control, num_calls


def cost_between_processes(num_pairs: int, num_blocks: int) -> StepCost:
    """Returns the difference between fresh processes with the harness and without it, in ABBA order: noisy but complete."""
    command = [sys.executable, str(STEP_PROGRAM), "--blocks", str(num_blocks)]
    cost = StepCost()
    with tempfile.TemporaryDirectory(prefix="overhead-") as place:
        bench = Bench(compose([], command=command).command, LocalLauncher(), Path(place))
        for pair in range(num_pairs):
            both = [(cost.without_us, lambda: _plain(command)), (cost.with_us, lambda: _to_the_end(bench))]
            for values, run in both if pair % 2 == 0 else reversed(both):
                values.append(statistics.median(run()["step_s"]) * 1e6)
            print(f"pair {pair + 1}: without {cost.without_us[-1]:.0f} us, with {cost.with_us[-1]:.0f} us", flush=True)
    return cost


def _plain(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return _printed(done.stdout, done.stderr)


def _to_the_end(bench: Bench) -> dict[str, Any]:
    measured = bench.measure({}, MEASURE_TO_THE_END)
    stdout, stderr = ((bench.last_folder / name).read_text() for name in (STDOUT_FILE, STDERR_FILE))
    if measured.result is None or measured.result.status != "ended":
        tail = stderr[-500:]
        raise SystemExit(f"the program was to be measured to its own end: {measured.outcome}: {measured.reason}\n{tail}")
    return _printed(stdout, stderr)


def _printed(stdout: str, stderr: str) -> dict[str, Any]:
    line = next((line for line in stdout.splitlines() if line.startswith("{")), None)
    if line is None:
        raise SystemExit(f"the program printed no times:\n{stderr[-2000:]}")
    return dict(json.loads(line))


def small_study(num_trials: int, runs: Path) -> list[TrialRecord]:
    """Returns the trials of a study of the step program."""
    overrides = [
        "study.name=overhead",
        f"study.budget.trials={num_trials}",
        f"study.budget.minutes={STUDY_MINUTES}",
        f"runs_dir={runs}",
    ]
    program = [sys.executable, str(STEP_PROGRAM), "--blocks", "1000"]
    subprocess.run([sys.executable, "-m", "autotune", "run", *overrides, "--", *program], check=True, stdout=subprocess.DEVNULL)
    trials = StudyFolder(runs / "overhead").read_trials()
    if len(trials) < LEAST_TRIALS:
        raise SystemExit(f"the study made {len(trials)} trials in {STUDY_MINUTES} minutes: is the machine busy?")
    return trials


def trial_costs(trials: list[TrialRecord]) -> list[tuple[str, str]]:
    """Returns the time that a trial spends in each phase (median over trials), and the time between two trials."""
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
    """Returns a sync's seconds per trial, and its seconds before the first trial (imports, a new store).

    There are three syncs: of the first trial into a new store, of all other trials, and of nothing new. The cost per trial is
    the difference between the last two.
    """
    place, late = runs.parent / "sync", runs.parent / "late"
    shutil.copytree(runs / "overhead", place / "overhead")
    (place / "overhead" / "trials").rename(late)
    (place / "overhead" / "trials").mkdir()
    first, *others = sorted(late.iterdir())
    (late / first.name).rename(place / "overhead" / "trials" / first.name)
    first_s = _sync(place)
    for folder in others:
        folder.rename(place / "overhead" / "trials" / folder.name)
    others_s = _sync(place)
    per_trial_s = (others_s - _sync(place)) / (num_trials - 1)
    return per_trial_s, first_s - per_trial_s


def _sync(place: Path) -> float:
    started_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "autotune", "sync", "overhead", "--runs-dir", str(place)], check=True)
    return time.monotonic() - started_s


def main() -> int:
    """Measures and prints the costs; returns 1 if a step costs more than the goal."""
    parser = argparse.ArgumentParser(description="what autotune itself costs")
    parser.add_argument("--processes", type=int, default=3, help="processes that remove the harness and install it again")
    parser.add_argument(
        "--blocks", type=int, default=60, help=f"number of blocks of {BLOCK_STEPS} steps, for each kind of measurement"
    )
    parser.add_argument(
        "--pairs", type=int, default=6, help="pairs of fresh processes with the harness and without; 0 for none"
    )
    parser.add_argument("--trials", type=int, default=6, help="trials of the small study; 0 leaves out parts 2 and 3")
    options = parser.parse_args()
    cost, control, num_calls = cost_in_one_process(options.processes, options.blocks)
    rows = [
        ("step without the harness", f"{statistics.median(cost.without_us):.0f} us"),
        ("harness, its own time", f"{cost.own_words()}, {num_calls} calls of its functions in a plain step"),
        ("harness, with minus without", f"{cost.words()} of processor time"),
        ("  control, without minus without", control.words()),
    ]
    if options.pairs:
        rows.append(("harness, fresh processes", cost_between_processes(options.pairs, options.blocks // 2).words()))
    if options.trials:
        with tempfile.TemporaryDirectory(prefix="overhead-") as place:
            trials = small_study(options.trials, Path(place) / "runs")
            rows += trial_costs(trials)
            per_trial_s, first_s = tracker_cost(Path(place) / "runs", len(trials))
        rows += [
            ("tracker, each trial", f"{per_trial_s:.3f} s"),
            ("tracker, once a study", f"{first_s:.1f} s, in addition to the first trial"),
        ]
    print("\n" + table(("what", "cost"), rows))
    print("\n".join(machine_lines()))
    is_reached = cost.own_us <= GOAL_US
    print(f"goal      own time at most {GOAL_US:g} us in a step, is {cost.own_us:.1f}: {'reached' if is_reached else 'MISSED'}")
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
