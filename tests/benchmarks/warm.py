"""Does a warm start give the same rate as a fresh start, and how much time does it save?

    python -m tests.benchmarks.warm [--pairs 6] [--only resnet18 launch-bound]

There are two programs: a recipe (resnet18 on photos of 96 pixels) and a launch-bound program with steps of a millisecond. Each
is measured in pairs of a fresh and a warm start, in ABBA order. The table gives the ratio of the rates with its interval, the
machine's own spread (of the fresh starts), the seconds from launch until torch is imported, and the time of a trial outside
warm-up and window, by phase.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autotune.config.compose import compose
from autotune.harness.protocol import MeasureRules
from autotune.launchers.local import LocalLauncher
from autotune.stats import margin_frac, paired_ratio
from tests.benchmarks.reporting import interval, machine_lines, table
from tests.benchmarks.trials import Bench, Measured

STEP_PROGRAM = Path(__file__).with_name("step_program.py")
RECIPE = ("model=resnet18", "model.image_size=96", "loader.num_workers=0")
ENDLESS = "1000"  # number of blocks, enough for minutes; the harness ends the program long before
RULES = MeasureRules(half_width_frac=0.01, slow_max_s=8.0)
MEASURING = ("warmup", "steady")
# A warm trial must start in at most this share of a fresh start's time, and spend at most this outside warm-up and window.
GOAL_START_FRAC, GOAL_OUTSIDE_S = 0.1, 1.5


def outside_s(trial: Measured) -> float:
    """Returns the seconds of a trial outside warm-up and window."""
    phases_s = trial.result.phases_s if trial.result else {}
    return trial.seconds - sum(phases_s.get(phase, 0.0) for phase in MEASURING)


def pairs(name: str, folder: Path, num_pairs: int, *, rules: MeasureRules = RULES) -> tuple[list[Measured], list[Measured]]:
    """Returns the fresh trials and the warm trials of a program, pair by pair.

    Args:
        name: name of the program.
        folder: folder of the trials.
        num_pairs: number of pairs of a fresh and a warm start.
        rules: when a trial stops.
    """
    if name == "resnet18":
        command, modules = compose(list(RECIPE), command=None).command, ("torch", "torchvision")
    else:
        command = compose([], command=[sys.executable, str(STEP_PROGRAM), "--blocks", ENDLESS]).command
        modules = ("torch",)
    launcher = LocalLauncher()
    bench = Bench(command, launcher, folder)
    fresh: list[Measured] = []
    warm: list[Measured] = []
    try:
        bench.measure({}, rules)  # fills the file system's caches, and finds out which loader trains
        bench.measure({}, rules, warm=modules)  # starts the server
        for index in range(num_pairs):
            for is_warm in (False, True) if index % 2 == 0 else (True, False):
                trial = bench.measure({}, rules, warm=modules if is_warm else ())
                if trial.rate_per_s is None or trial.start != ("warm" if is_warm else "fresh"):
                    raise SystemExit(f"{name}: a {trial.start} trial ended as {trial.outcome}: {trial.reason}")
                (warm if is_warm else fresh).append(trial)
                print(f"  {name} {trial.start} {trial.rate_per_s:.2f}/s, ready after {trial.ready_s:.3f} s", flush=True)
    finally:
        launcher.close()
    return fresh, warm


def rows(name: str, fresh: Sequence[Measured], warm: Sequence[Measured]) -> list[tuple[str, ...]]:
    """Returns the rows of the table for one program."""
    rates, others = ([float(trial.rate_per_s or 0.0) for trial in trials] for trials in (warm, fresh))
    ratio = paired_ratio(rates, others)
    margin = margin_frac(others)
    start_s = [statistics.median(float(trial.ready_s or 0.0) for trial in trials) for trials in (fresh, warm)]
    rest_s = [statistics.median(outside_s(trial) for trial in trials) for trials in (fresh, warm)]
    is_same = ratio.ci is not None and ratio.ci[0] > 1 - margin and ratio.ci[1] < 1 + margin
    rate_goal = f"within {margin:.1%}: {'yes' if is_same else 'no'}"
    start_goal = f"<= {GOAL_START_FRAC:.2f}: {'yes' if start_s[1] <= GOAL_START_FRAC * start_s[0] else 'no'}"
    rest_goal = f"<= {GOAL_OUTSIDE_S} s: {'yes' if rest_s[1] <= GOAL_OUTSIDE_S else 'no'}"
    rate = statistics.median(others), statistics.median(rates)
    return [
        (name, "rate per second", f"{rate[0]:.2f}", f"{rate[1]:.2f}", f"{ratio.ratio:.4f} {interval(ratio.ci, 4)}", rate_goal),
        (name, "launch to torch, s", f"{start_s[0]:.3f}", f"{start_s[1]:.3f}", f"{start_s[1] / start_s[0]:.3f}", start_goal),
        (
            name,
            "outside warm-up and window, s",
            f"{rest_s[0]:.2f}",
            f"{rest_s[1]:.2f}",
            f"{rest_s[1] / rest_s[0]:.2f}",
            rest_goal,
        ),
    ]


def phase_rows(name: str, fresh: Sequence[Measured], warm: Sequence[Measured]) -> list[tuple[str, ...]]:
    """Returns rows with the median seconds of each phase, and of the rest of a trial."""
    found = []
    for phase in ("import", "init", "first_batch", "compile", "exit"):
        both = [
            statistics.median(trial.result.phases_s.get(phase, 0.0) if trial.result else 0.0 for trial in trials)
            for trials in (fresh, warm)
        ]
        found.append((name, phase, *(f"{seconds:.3f}" for seconds in both)))
    rest = [
        statistics.median(trial.seconds - sum((trial.result.phases_s if trial.result else {}).values()) for trial in trials)
        for trials in (fresh, warm)
    ]
    return [*found, (name, "before and after", *(f"{seconds:.3f}" for seconds in rest))]


def main() -> None:
    """Measures the programs and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=["resnet18", "launch-bound"])
    chosen = parser.parse_args()
    print("\n".join(machine_lines()), flush=True)
    results, phases = [], []
    for name in chosen.only:
        with tempfile.TemporaryDirectory() as folder:
            fresh, warm = pairs(name, Path(folder) / "study" / "trials", chosen.pairs)
        results += rows(name, fresh, warm)
        phases += phase_rows(name, fresh, warm)
    print(f"\n{chosen.pairs} pairs, medians; ratio: warm over fresh\n")
    print(table(("program", "what", "fresh", "warm", "ratio", "goal"), results))
    print("\nseconds by phase\n")
    print(table(("program", "phase", "fresh", "warm"), phases))


if __name__ == "__main__":
    main()
