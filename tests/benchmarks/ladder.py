"""Compares autotune's winner with the configuration that an expert finds knob by knob; one command measures both.

    python -m tests.benchmarks.ladder [--model resnet18] [--minutes 8] [--rounds 4] [KEY=VALUE ...]

1. The ladder: starting from the unchanged program, it tries one knob after the other (bf16, channels_last, fused optimizer,
   threads, workers, batch, compile). It keeps a value that measured faster, regardless of noise.
2. `autotune run` on the same recipe, in its own process, with its default budget.
3. Both winners are measured again, in fresh processes, in the order ABBA. Only these rounds are reported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from autotune.config.compose import compose
from autotune.harness.protocol import MeasureRules
from autotune.launchers.local import LocalLauncher
from autotune.machine import host_facts
from autotune.records import Knobs, Summary
from autotune.run_dir import StudyFolder
from autotune.stats import paired_ratio
from tests.benchmarks.reporting import interval, machine_lines, table
from tests.benchmarks.trials import Bench, Measured

SCREENING = MeasureRules()
FINALS = MeasureRules(half_width_frac=0.005, slow_max_s=20.0)
GOAL_RATIO = 0.95  # the winner must reach this share of the ladder's best
MAX_DOUBLINGS_CPU, MAX_DOUBLINGS_CUDA = 2, 5


class Ladder:
    """Searches as an expert does: one knob at a time, keeping each value that measured faster."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.best: Knobs = {}
        self.best_rate_per_s = 0.0
        self.rows: list[tuple[str, str, str, str]] = []

    def climb(self) -> None:
        """Measures the baseline and every rung."""
        self.try_out({})
        for rung in self.rungs():
            self.try_out({**self.best, **rung})

    def try_out(self, knobs: Knobs) -> None:
        """Measures a configuration and keeps it if it is the fastest so far."""
        measured = self.bench.measure(knobs, SCREENING)
        missing = ", ".join(f"{key} {why}" for key, why in measured.not_applied.items())
        rate_per_s = measured.rate_per_s or 0.0
        is_better = not missing and rate_per_s > self.best_rate_per_s
        if is_better:
            self.best, self.best_rate_per_s = knobs, rate_per_s
        note = "kept" if is_better else missing or (measured.reason if not measured.rate_per_s else "")
        self.rows.append(
            (_words(knobs), f"{rate_per_s:.1f}" if rate_per_s else str(measured.outcome), note, f"{measured.seconds:.0f}")
        )
        print("ladder  " + "  ".join(self.rows[-1]), flush=True)

    def rungs(self) -> Iterator[Knobs]:
        """Yields the change that each rung tries. Later rungs depend on the best configuration so far."""
        facts = host_facts()
        num_cores, has_cuda = num_effective_cores(facts), bool(facts["gpus"])
        yield {"precision.amp": "bf16"}
        yield {"layout.channels_last": True}
        yield {"optimizer.implementation": "fused"}
        if has_cuda:
            yield {"backend.cudnn_benchmark": True}
            yield {"precision.matmul": "high"}
        for num_threads in sorted({1, max(1, num_cores // 2)} - {num_cores}):
            yield {"threads.intra": num_threads}
        for num_workers in sorted({1, 2, num_cores, *([4, 8] if has_cuda else [])}):
            yield {"loader.num_workers": num_workers, **({"loader.pin_memory": True} if has_cuda else {})}
        yield from self._doublings(MAX_DOUBLINGS_CUDA if has_cuda else MAX_DOUBLINGS_CPU)
        yield {"compile.mode": "default"}

    def _doublings(self, at_most: int) -> Iterator[Knobs]:
        own = int(self.bench.observed["loader.batch_size"])
        for doubling in range(1, at_most + 1):
            batch_size = own * 2**doubling
            yield {"loader.batch_size": batch_size}
            if doubling >= MAX_DOUBLINGS_CPU and self.best.get("loader.batch_size") != batch_size:
                return


def num_effective_cores(facts: dict[str, object]) -> int:
    """Returns the number of cores that this process may use, as the tuner counts them."""
    return int(str(facts["num_cores"]))


def search(overrides: list[str], runs: Path) -> tuple[Knobs, Summary]:
    """Runs autotune by the command line that a user would type; returns the winner's changes and the summary."""
    command = [sys.executable, "-m", "autotune", "run", *overrides, f"runs_dir={runs}", "study.name=ladder"]
    print("search  " + " ".join(command[2:]), flush=True)
    subprocess.run(command, check=True)
    summary = StudyFolder(runs / "ladder").read_summary()
    best = summary["best"]
    return (best["overrides"] if best else {}), summary


def duel(bench: Bench, ours: Knobs, theirs: Knobs, num_rounds: int) -> tuple[list[float], list[float]]:
    """Returns the rates of both configurations in each round, measured in the order ABBA ABBA."""
    rates: dict[str, list[float]] = {"winner": [], "ladder": []}
    for round_number in range(num_rounds):
        order = [("winner", ours), ("ladder", theirs)]
        for name, knobs in order if round_number % 2 == 0 else reversed(order):
            measured: Measured = bench.measure(knobs, FINALS)
            if measured.rate_per_s is None:
                raise SystemExit(f"{name} did not train when measured again: {measured.outcome}: {measured.reason}")
            rates[name].append(measured.rate_per_s)
            print(f"round {round_number + 1}  {name}  {measured.rate_per_s:.2f}", flush=True)
    return rates["winner"], rates["ladder"]


def _words(knobs: Knobs) -> str:
    return " ".join(f"{key}={value}" for key, value in knobs.items()) or "baseline"


def _verdict(summary: Summary) -> str:
    speedup = summary["speedup"]
    if not speedup:
        return "none"
    return f"{speedup['verdict']} {speedup['ratio']:.2f}x" if speedup["ratio"] else str(speedup["verdict"])


def main() -> int:
    """Runs the three parts and prints the comparison; returns 1 if autotune's winner falls short of the ladder's."""
    parser = argparse.ArgumentParser(description="autotune's winner against a hand ladder")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--minutes", type=float, default=8.0, help="budget of `autotune run`")
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each winner")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for both, such as data=synthetic")
    options = parser.parse_args()
    overrides = [f"model={options.model}", *options.overrides]
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ladder-") as place:
        bench = Bench(compose(overrides, command=None).command, LocalLauncher(), Path(place) / "trials")
        ladder = Ladder(bench)
        ladder.climb()
        climbed_s = time.monotonic() - started_s
        winner, summary = search([*overrides, f"study.budget.minutes={options.minutes}"], Path(place) / "runs")
        ours, theirs = duel(bench, winner, ladder.best, options.rounds)
    ratio = paired_ratio(ours, theirs)
    print("\n" + table(("configuration", "samples/s", "", "seconds"), ladder.rows))
    print(f"\nladder's best     {_words(ladder.best)}   ({climbed_s:.0f} s)")
    print(f"autotune's winner {_words(winner)}   ({summary['seconds']['total']:.0f} s, its own verdict: {_verdict(summary)})")
    print(
        f"winner / ladder   {ratio.ratio:.3f} {interval(ratio.ci)}, n = {ratio.num_rounds} rounds each, fresh processes, ABBA"
    )
    print("\n".join(machine_lines()))
    print(f"goal              at least {GOAL_RATIO}: {'reached' if ratio.ratio >= GOAL_RATIO else 'MISSED'}")
    return 0 if ratio.ratio >= GOAL_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
