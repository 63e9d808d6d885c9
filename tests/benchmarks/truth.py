"""Compares the rate of a short trial with that of a long run, for programs that short trials tend to measure wrongly.

    python -m tests.benchmarks.truth [--only KIND ...] [--quick] [--rounds N] [--json FILE]

Short trials and long runs of each kind of `truth_program.py` alternate, each in fresh processes. A short trial is a search
trial: launcher, harness, default rules. A long run is the program without autotune, which measures itself for at least ten
times the short trial's window. Next to the prediction, the table gives the naive result from the same trial's steps: the mean
of twenty steps after three warm-up steps.

If the trial gives a device rate D, D is compared with the rate of the same program on one fixed batch.

The rate of a program that computes drifts with the machine (measured: by 15 % within a minute on a shared host). Such programs
get three rounds, and a run during which other programs used the cores is repeated, as in a study. Programs that sleep get one
round.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.config.compose import compose
from autotune.config.schema import MeasureOptions
from autotune.harness.protocol import RankResult
from autotune.launchers.local import LocalLauncher
from autotune.monitors.cpu import CpuMonitor
from autotune.monitors.disturbances import FOREIGN_CORES
from tests.benchmarks.reporting import machine_lines, table
from tests.benchmarks.trials import Bench, Measured
from tests.benchmarks.truth_program import KINDS

PROGRAM = Path(__file__).with_name("truth_program.py")
GOAL_FRAC, BURSTY_GOAL_FRAC, DEVICE_GOAL_FRAC = 0.03, 0.06, 0.05
LONGER = 10  # length of a long run, as a multiple of the short trial's window
LEAST_LONG_S = 20.0
SKIP_S, SKIP_STEPS = 8.0, 20  # a long run skips these seconds or steps, whichever is longer, until its queues have drained
DEVICE_S = 5.0  # length of a run with one fixed batch
NAIVE_WARMUP, NAIVE_STEPS = 3, 20
ROUNDS, COMPUTING_ROUNDS = 1, 3
MAX_ATTEMPTS = 3  # attempts at a run that is not disturbed by other programs
UNPREDICTABLE = ("growing",)  # kinds whose trials must end as `unsteady`
QUICK = ("loader-1", "loader-4", "shared-1", "device", "recompiles", "growing")


@dataclass(kw_only=True)
class Short:
    """One short trial: its rate, and the naive rate from the same steps."""

    rate_per_s: float | None
    naive_per_s: float | None
    device_rate_per_s: float | None
    loader_rate_per_s: float | None
    window_s: float
    outcome: str
    reason: str
    regime: str
    seconds: float


@dataclass(kw_only=True)
class Comparison:
    """Short trials and long runs of a kind, in the order in which they were made: short, long, short, ..."""

    kind: str
    shorts: list[Short] = field(default_factory=list)
    longs: list[dict[str, float]] = field(default_factory=list)
    free_per_s: float | None = None  # rate of the same program on one fixed batch
    num_disturbed: int = 0  # number of runs that were repeated

    @property
    def goal_frac(self) -> float:
        """Returns the largest allowed error."""
        return BURSTY_GOAL_FRAC if KINDS[self.kind].cv else GOAL_FRAC

    @property
    def truth_per_s(self) -> float:
        """Returns the mean rate of the long runs."""
        return statistics.fmean(long["rate_per_s"] for long in self.longs)

    def errors(self, name: str = "rate_per_s") -> list[float]:
        """Returns, for each short trial, its rate divided by the mean rate of the long runs before and after it, minus 1."""
        found = []
        for index, short in enumerate(self.shorts):
            beside = [long["rate_per_s"] for long in self.longs[max(0, index - 1) : index + 1]]
            value = getattr(short, name)
            if value and beside:
                found.append(value / statistics.fmean(beside) - 1)
        return found

    @property
    def device_error(self) -> float | None:
        """Returns D divided by the rate on one fixed batch, minus 1; None if no trial gave D, or it cannot be compared."""
        claimed = [short.device_rate_per_s for short in self.shorts if short.device_rate_per_s]
        return statistics.fmean(claimed) / self.free_per_s - 1 if claimed and self.free_per_s else None

    def misses(self) -> list[str]:
        """Returns the missed goals."""
        flagged = all(short.outcome == "unsteady" for short in self.shorts)
        if self.kind in UNPREDICTABLE:
            return [] if flagged else ["not flagged"]
        found = [short.reason or short.outcome for short in self.shorts if short.outcome != "ok"]
        errors = self.errors()
        if not errors or abs(statistics.fmean(errors)) > self.goal_frac:
            found.append("prediction")
        if self.device_error is not None and abs(self.device_error) > DEVICE_GOAL_FRAC:
            found.append("D")
        return found

    def row(self) -> list[str]:
        """Returns the kind's row of the table."""
        last = self.shorts[-1]
        predicted = statistics.fmean(short.rate_per_s or math.nan for short in self.shorts)
        return [
            self.kind,
            f"{predicted:.1f}",
            f"{self.truth_per_s:.1f}",
            _errors(self.errors()),
            _errors(self.errors("naive_per_s")),
            "" if self.device_error is None else f"{self.device_error:+.1%}",
            last.regime,
            f"{last.window_s:.1f}, {self.longs[-1]['seconds']:.0f}",
            f"{last.seconds:.0f}",
            f"{len(self.shorts)}, {len(self.longs)}",
            "; ".join(self.misses()) or (last.reason if self.kind in UNPREDICTABLE else "reached"),
        ]


def naive_per_s(result: RankResult) -> float | None:
    """Returns the rate of 20 steps after 3 warm-up steps, from a trial's raw steps; None if there are too few.

    `end_s` holds the ends of the steps after the first one, relative to the end of the first step.
    """
    ends, samples = result.steps.get("end_s", []), result.steps.get("samples", [])
    first, last = NAIVE_WARMUP - 2, NAIVE_WARMUP - 2 + NAIVE_STEPS
    if len(ends) <= last:
        first, last = min(NAIVE_WARMUP - 2, len(ends) - 2), len(ends) - 1  # slow trials have fewer steps: use all of them
    if first < 0 or last <= first:
        return None
    return float(sum(samples[first + 1 : last + 1]) / (ends[last] - ends[first]))


def short_trial(bench: Bench) -> Short:
    """Returns a search trial of the program."""
    measured: Measured = bench.measure({}, MeasureOptions().screening)
    result = measured.result
    if result is None or result.window is None:
        raise SystemExit(f"{bench.command.argv({})}: {measured.outcome}: {measured.reason}, see {bench.last_folder}")
    return Short(
        rate_per_s=measured.rate_per_s,
        naive_per_s=naive_per_s(result),
        device_rate_per_s=result.device_rate_per_s,
        loader_rate_per_s=result.loader_rate_per_s,
        window_s=result.window.seconds,
        outcome=str(measured.outcome),
        reason=measured.reason,
        regime=result.regime,
        seconds=measured.seconds,
    )


def long_run(kind: str, seconds: float, *words: str, skip_s: float) -> dict[str, float]:
    """Returns the rate that the program itself measures over a long run."""
    command = [sys.executable, str(PROGRAM), "--kind", kind, "--skip-s", str(skip_s), "--seconds", str(seconds), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def undisturbed(found: Comparison, run: Callable[[], Any]) -> Any:
    """Returns the result of a run. If other programs use the cores of a program that computes, repeats the run a few times."""
    monitor = CpuMonitor()
    for _ in range(MAX_ATTEMPTS if KINDS[found.kind].computes else 1):
        before = monitor.look(time.monotonic())
        made = run()
        use = monitor.use(before, monitor.look(time.monotonic()))
        if use is None or (use.foreign_cores or 0.0) <= FOREIGN_CORES or not KINDS[found.kind].computes:
            break
        found.num_disturbed += 1
        print(f"{found.kind}: other programs used {use.foreign_cores:.2f} cores, once more", file=sys.stderr, flush=True)
    return made


def compare(kind: str, *, num_rounds: int | None) -> Comparison:
    """Measures short trials and long runs of a kind, in turn."""
    found = Comparison(kind=kind)
    with tempfile.TemporaryDirectory(prefix="truth-") as place:
        command = [sys.executable, str(PROGRAM), "--kind", kind]
        bench = Bench(compose([], command=command).command, LocalLauncher(), Path(place))
        found.shorts.append(undisturbed(found, lambda: short_trial(bench)))
        for _ in range(num_rounds or (COMPUTING_ROUNDS if KINDS[kind].computes else ROUNDS)):
            seconds = max(LEAST_LONG_S, LONGER * found.shorts[-1].window_s)
            skip_s = max(SKIP_S, SKIP_STEPS * KINDS[kind].step_s)
            found.longs.append(undisturbed(found, functools.partial(long_run, kind, seconds, skip_s=skip_s)))
            found.shorts.append(undisturbed(found, lambda: short_trial(bench)))
        if KINDS[kind].workers and any(short.device_rate_per_s for short in found.shorts):
            found.free_per_s = long_run(kind, DEVICE_S, "--free-loader", skip_s=1.0)["rate_per_s"]
    return found


def _errors(errors: Sequence[float]) -> str:
    if not errors:
        return "none"
    return f"{statistics.fmean(errors):+.1%} ({min(errors):+.1%} to {max(errors):+.1%})"


HEADER = (
    "program", "predicted/s", "achieved/s", "error", "naive error", "D error", "regime", "window, long s", "trial s", "n",
    "goal",
)  # fmt: skip


def report(found: Sequence[Comparison]) -> str:
    """Returns the table, with lines on the machine and on how it was measured."""
    lines = [table(HEADER, [comparison.row() for comparison in found])]
    again = sum(comparison.num_disturbed for comparison in found)
    lines.append(f"n         short trials, long runs, in turn; mean (least to most); {again} repeated, disturbed by others")
    lines.append(f"date      {time.strftime('%Y-%m-%d')}")
    return "\n".join([*lines, *machine_lines()])


def main() -> int:
    """Measures and prints the comparison; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="what short trials predict against what long runs achieve")
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", help=f"one or more of {', '.join(KINDS)}")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--rounds", type=int, help="long runs of each kind; there is one more short trial")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    options = parser.parse_args()
    found: list[Comparison] = []
    for kind in options.only or (QUICK if options.quick else KINDS):
        found.append(compare(kind, num_rounds=options.rounds))
        print("  ".join(found[-1].row()), flush=True)
        if options.json:
            options.json.write_text(json.dumps([_document(comparison) for comparison in found], indent=1))
    print("\n" + report(found))
    missed = {comparison.kind: misses for comparison in found if (misses := comparison.misses())}
    goal = f"error at most {GOAL_FRAC:.0%}, bursty {BURSTY_GOAL_FRAC:.0%}, D {DEVICE_GOAL_FRAC:.0%}; growing flagged"
    print(f"goal      {goal}: {'reached' if not missed else 'MISSED by ' + ', '.join(missed)}")
    return 1 if missed else 0


def _document(comparison: Comparison) -> dict[str, Any]:
    return {**asdict(comparison), "misses": comparison.misses()}


if __name__ == "__main__":
    sys.exit(main())
