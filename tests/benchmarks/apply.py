"""Does `autotune apply` train as fast as the trial did, and as fast as the same settings written by hand?

    python -m tests.benchmarks.apply [--rounds 4] [--seconds 20]

Each round runs three things in fresh processes: a trial with the winner's settings (launcher, harness, default rules), the
program under `autotune apply`, and the program with the same settings in its own code. The program times the last two itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from autotune.config.compose import compose
from autotune.harness.protocol import MeasureRules
from autotune.launchers.environment import own_environment
from autotune.launchers.local import LocalLauncher
from autotune.records import Knobs
from tests.benchmarks.reporting import machine_lines, table
from tests.benchmarks.trials import Bench

PROGRAM = Path(__file__).with_name("apply_program.py")
KNOBS: Knobs = {
    "loader.batch_size": 32,
    "loader.num_workers": 1,
    "precision.amp": "bf16",
    "layout.channels_last": True,
    "optimizer.implementation": "foreach",
}
BY_HAND = ("--batch", "32", "--workers", "1", "--bf16", "--channels-last")  # SGD uses foreach by default where it pays
GOAL_FRAC = 0.05
SKIP_S = 6.0  # time until the loader's queue has a stable length


def write_best(path: Path, knobs: Knobs, target: object) -> None:
    """Writes the settings in the form that `autotune export` writes."""
    document: dict[str, dict[str, object]] = {"provenance": {"study": "benchmark", "target": target}}
    for key, value in knobs.items():
        group, _, name = key.partition(".")
        document.setdefault(group, {})[name] = value
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


def own_rate_per_s(seconds: float, *, under: Sequence[str] = (), words: Sequence[str] = ()) -> float:
    """Returns the samples per second that the program itself measures.

    Args:
        seconds: how long the program measures.
        under: words before the program's command, such as `autotune apply`.
        words: further arguments of the program.
    """
    command = [*under, sys.executable, str(PROGRAM), "--skip-s", str(SKIP_S), "--seconds", str(seconds), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=own_environment())
    if under and f"all {len(KNOBS)} settings" not in done.stderr:
        raise SystemExit(f"not everything was applied:\n{done.stderr}")
    return float(json.loads(done.stdout)["rate_per_s"])


def measure(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Returns the rates per second of trials, applied runs and runs with settings written by hand, measured in turn."""
    found: dict[str, list[float]] = {"trial": [], "applied": [], "by hand": []}
    with tempfile.TemporaryDirectory(prefix="apply-") as place:
        bench = Bench(compose([], command=[sys.executable, str(PROGRAM)]).command, LocalLauncher(), Path(place))
        bench.measure({}, MeasureRules())  # finds out which loader trains
        best = Path(place) / "best.yaml"
        write_best(best, KNOBS, bench.target)
        for number in range(rounds):
            measured = bench.measure(KNOBS, MeasureRules())
            if measured.rate_per_s is None or measured.not_applied:
                raise SystemExit(f"{measured.outcome}: {measured.reason} {measured.not_applied}")
            found["trial"].append(measured.rate_per_s)
            found["applied"].append(own_rate_per_s(seconds, under=[sys.executable, "-m", "autotune", "apply", str(best), "--"]))
            found["by hand"].append(own_rate_per_s(seconds, words=BY_HAND))
            print(f"round {number}  " + "  ".join(f"{name} {rates[-1]:.1f}/s" for name, rates in found.items()), flush=True)
    return found


def ratios(found: dict[str, list[float]], over: str) -> list[float]:
    """Returns, for each round, the applied run's rate divided by another run's rate."""
    return [applied / other for applied, other in zip(found["applied"], found[over], strict=True)]


def main() -> int:
    """Measures and prints the rates; returns 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description="the measured rate against the rate of an applied run")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the program measures itself")
    options = parser.parse_args()
    found = measure(options.rounds, options.seconds)
    rows = []
    for over in ("trial", "by hand"):
        values = ratios(found, over)
        mean = statistics.geometric_mean(values)
        rows.append([f"applied / {over}", f"{mean:.3f}", f"{min(values):.3f} to {max(values):.3f}", len(values)])
    print("\n" + table(("ratio", "mean", "least to most", "n"), rows))
    print("\n".join([*machine_lines(), f"date      {time.strftime('%Y-%m-%d')}"]))
    is_reached = abs(statistics.geometric_mean(ratios(found, "trial")) - 1) <= GOAL_FRAC
    print(f"goal      within {GOAL_FRAC:.0%} of the trial's rate: {'reached' if is_reached else 'MISSED'}")
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
