"""Stage `truth`: compares the rates of short trials with the rate that the same program measures itself over a minute.

The programs are variants of `tests/benchmarks/image_program.py` with different bottlenecks. Each runs short, long, short, in
fresh processes. `tests/benchmarks/truth.py` judges the method alone, with loaders and steps that sleep.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

from autotune.launchers.environment import own_environment
from tests.benchmarks.gpu_campaign.checks import Check, Found, Goal, Place
from tests.benchmarks.gpu_campaign.trying import SCREENING, command
from tests.benchmarks.rivals import PROGRAM

LONG_S, SKIP_S = 60.0, 8.0  # SKIP_S: time until the loader's queue has a stable length
DRY_LONG_S, DRY_SKIP_S = 0.3, 0.1
ERROR_FRAC = 0.02
SLACK_S = 120.0  # extra time for the start of a long run


@dataclass(frozen=True, kw_only=True)
class Program:
    """A variant of the program.

    Attributes:
        title: its bottleneck.
        words: its options.
    """

    title: str
    words: tuple[str, ...]


PROGRAMS = (
    Program(title="bound by its one loader worker", words=("--size", "224", "--batch", "128", "--workers", "1")),
    Program(title="bound by the device", words=("--size", "224", "--batch", "256", "--amp", "bf16", "--channels-last")),
    Program(title="bound by its launches", words=("--size", "32", "--batch", "16")),
    Program(
        title="twelve workers beside the device", words=("--size", "224", "--batch", "256", "--workers", "12", "--amp", "bf16")
    ),
)
DRY = Program(title="small", words=("--model", "small", "--batch", "8"))


def foretold(program: Program, place: Place) -> Found:
    """Two short trials give the same rate as the long run between them."""
    words = [sys.executable, str(PROGRAM), *program.words]
    trials = command(place, program.title, words)
    seconds, skip_s = (DRY_LONG_S, DRY_SKIP_S) if place.is_dry else (LONG_S, SKIP_S)

    def long_run() -> dict[str, float]:
        timed = [*words, "--seconds", str(seconds), "--skip-s", str(skip_s)]
        limit_s = seconds + skip_s + SLACK_S
        done = subprocess.run(timed, capture_output=True, text=True, env=own_environment(), timeout=limit_s)
        assert done.returncode == 0, done.stderr[-600:]
        return dict(json.loads(done.stdout.splitlines()[-1]))

    shorts = [trials.measure({}, SCREENING)]
    long = place.kept(f"{program.title}: long", long_run)
    shorts += [] if place.is_dry else [trials.measure({}, SCREENING, again=1)]
    rates = [short["rate_per_s"] for short in shorts]
    assert all(rates), f"{[short['reason'] for short in shorts]}"
    error = statistics.geometric_mean(rates) / long["rate_per_s"] - 1
    gaps = [short["clock_gap_frac"] for short in shorts if short["clock_gap_frac"] is not None]
    clock = f"; wall time and events {max(gaps):.2%} apart" if gaps else ""
    words_of = (
        f"{' and '.join(f'{rate:.1f}' for rate in rates)}/s predicted, {long['rate_per_s']:.1f}/s achieved, {error:+.2%}{clock}"
    )
    return Found(evidence=words_of, goals=[Goal(what="error", value=abs(error), bound=ERROR_FRAC, is_ceiling=True)])


def checks(is_dry: bool) -> list[Check]:
    """Returns the checks of the stage."""
    chosen = [DRY] if is_dry else PROGRAMS
    found = [Check(name=program.title, run=partial(foretold, program), seconds=100.0) for program in chosen]
    left_out = PROGRAMS if is_dry else ()
    return [*found, *(Check(name=each.title, run=partial(foretold, each), needs_cuda="its rate on a GPU") for each in left_out)]
