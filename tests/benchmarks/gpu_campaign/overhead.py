"""Stage `overhead`: what autotune itself costs, by `tests/benchmarks/overhead.py` and `tests/benchmarks/warm.py`."""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from autotune.stats import margin_frac, paired_ratio
from tests.benchmarks import overhead, warm
from tests.benchmarks.gpu_campaign.checks import Check, Found, Goal, Place
from tests.benchmarks.gpu_campaign.trying import DRY
from tests.benchmarks.reporting import table

PAIRS = 4
NUM_TRIALS = 6  # number of trials of the small study
TUNER_FRAC = 0.05  # maximum share of a study's wall time between its trials
BLOCKS, DRY_BLOCKS = 40, 2
PROGRAMS = ("launch-bound", "resnet18")


def harness_is_cheap(place: Place) -> Found:
    """The harness takes little time of a launch-bound step of about a millisecond."""
    num_blocks = DRY_BLOCKS if place.is_dry else BLOCKS

    def measure() -> dict[str, Any]:
        cost, control, num_calls = overhead.cost_in_one_process(1, num_blocks)
        return {
            "own_frac": cost.own_frac,
            "step_us": statistics.median(cost.without_us),
            "words": cost.own_words(),
            "with_minus_without_us": cost.median_us,
            "control_us": control.median_us,
            "num_calls": num_calls,
        }

    found = place.kept("harness", measure)
    words = (
        f"{found['words']} of {found['step_us']:.0f} us; with minus without {found['with_minus_without_us']:.1f} us "
        f"of processor time (control {found['control_us']:.1f})"
    )
    goal = Goal(
        what="harness, share of a step", value=statistics.median(found["own_frac"]), bound=overhead.GOAL_FRAC, is_ceiling=True
    )
    return Found(evidence=words, goals=[goal])


def warm_beside_fresh(program: str, place: Place) -> Found:
    """Warm starts give the same rate as fresh starts, and meet the goals for the time that they save."""
    num_pairs, rules = (1, DRY) if place.is_dry else (PAIRS, warm.RULES)

    def measure() -> list[dict[str, list[float]]]:
        found = warm.pairs(program, new_folder(place) / "study" / "trials", num_pairs, rules=rules)
        return [
            {
                "rate_per_s": [float(trial.rate_per_s or 0.0) for trial in trials],
                "ready_s": [float(trial.ready_s or 0.0) for trial in trials],
                "outside_s": [warm.outside_s(trial) for trial in trials],
            }
            for trials in found
        ]

    fresh, warmed = place.kept(f"warm, {program}", measure)
    ratio = paired_ratio(warmed["rate_per_s"], fresh["rate_per_s"]).ratio
    margin = margin_frac(fresh["rate_per_s"])
    ready_s, outside_s = ([statistics.median(trials[name]) for trials in (fresh, warmed)] for name in ("ready_s", "outside_s"))
    goals = [
        Goal(what="rate warm over fresh, off by", value=abs(ratio - 1), bound=margin, is_ceiling=True),
        Goal(what="start warm over fresh", value=ready_s[1] / ready_s[0], bound=warm.GOAL_START_FRAC, is_ceiling=True),
        Goal(what="seconds outside warm-up and window", value=outside_s[1], bound=warm.GOAL_OUTSIDE_S, is_ceiling=True),
    ]
    words = f"rate {ratio:.4f}; torch there after {ready_s[0]:.2f} s fresh, {ready_s[1]:.3f} s warm; {num_pairs} pairs"
    return Found(evidence=words, goals=goals)


def tuner_is_cheap(place: Place) -> Found:
    """The time between the trials is a small share of a study's wall time."""

    def measure() -> dict[str, Any]:
        trials = overhead.small_study(NUM_TRIALS, new_folder(place))
        spent_s = sum(trial.seconds for trial in trials)
        whole_s = trials[-1].started_at + trials[-1].seconds - trials[0].started_at
        return {"trials_s": spent_s, "whole_s": whole_s, "rows": overhead.trial_costs(trials)}

    found = place.kept("study", measure)
    share = 1 - found["trials_s"] / found["whole_s"]
    words = f"{found['whole_s'] - found['trials_s']:.1f} of {found['whole_s']:.0f} s lie between trials"
    goal = Goal(what="tuner, share of wall time", value=share, bound=TUNER_FRAC, is_ceiling=True)
    return Found(evidence=words, goals=[goal], detail=table(("a trial", "median (least to most)"), found["rows"]))


def new_folder(place: Place) -> Path:
    """Returns a new folder, so that files of an earlier run of the command are not mistaken for results of this one."""
    return Path(tempfile.mkdtemp(dir=place.folder))


def checks(is_dry: bool) -> list[Check]:
    """Returns the checks of the stage."""
    programs = PROGRAMS[:1] if is_dry else PROGRAMS
    study = Check(name="the tuner between trials", run=tuner_is_cheap, seconds=120.0)
    return [
        Check(name="the harness in a step", run=harness_is_cheap, seconds=60.0),
        *(
            Check(name=f"warm starts beside fresh ones, {program}", run=partial(warm_beside_fresh, program), seconds=120.0)
            for program in programs
        ),
        *([] if is_dry else [study]),
    ]
