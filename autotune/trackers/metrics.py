"""Converts the numbers of trials and studies to MLflow metrics: names in plain words, common units, three digits.

The study's folder keeps the exact numbers in SI units. MLflow groups names with the same word before a slash, and shows the
group "system" on a separate tab. Its classic compare page first shows the metric whose name sorts first, capitals before small
letters. So among a trial's metrics, only the rate has a name that begins with a capital.
"""

from __future__ import annotations

import math
import re
from itertools import accumulate
from typing import Any

from autotune.quantities import number_text
from autotune.records import COST, ENERGY, TIME, Kind, Summary, TrialRecord

MAX_KEY_CHARACTERS = 250  # limit of MLflow 3 (mlflow/utils/validation.py)

RATIO = "ratio to baseline"  # a study's ratio, as in its verdict: measured in the finals
# A trial's ratio: its only measurement divided by the baseline's first. It has another name than RATIO, because the largest of
# many such ratios is overstated.
SINGLE_RATIO = "ratio measured once"
STEP_ALONE, LOADER_ALONE = "step alone per second", "loader alone per second"  # TrialRecord.device_rate and loader_rate
MEMORY = "memory GiB"

# Objective -> its metric. Throughput is not listed: its metric is the rate.
OBJECTIVES = {TIME: "time for samples s", ENERGY: "energy per {unit} J", COST: "cost per epoch"}

# Suffix of a stored name -> unit in MLflow, and the factor that converts to this unit. The first suffix that fits is used.
_UNITS = (
    ("_bytes_per_s", "MiB per s", 2.0**-20),
    ("_per_s", "per s", 1.0),
    ("_bytes", "GiB", 2.0**-30),
    ("_frac", "percent", 100.0),
    ("_mhz", "MHz", 1.0),
    ("_w", "W", 1.0),
    ("_j", "J", 1.0),
    ("_s", "s", 1.0),
)
# First word of a stored name -> its group in MLflow.
GROUPS = {
    "gpu": "system",
    "host": "system",
    "rank": "ranks",
    "ranks": "ranks",
    "communication": "ranks",
    "step": "time",
    "window": "time",
    "compile": "time",
    "compiled": "time",
}


def rate_name(unit: str) -> str:
    """Returns the name of the metric that holds a trial's rate: "Samples per second"."""
    return f"{unit.capitalize()} per second"


def objective_name(name: str, unit: str) -> str:
    """Returns the name of the metric that holds an objective other than throughput: "energy per sample J"."""
    return OBJECTIVES[name].format(unit=unit.removesuffix("s"))


def trial_metrics(trial: TrialRecord, baseline: TrialRecord | None = None) -> dict[str, float]:
    """Returns a trial's metrics; unknown and non-finite numbers are left out. A trial that measured no rate has none."""
    if trial.value is None:
        return {}
    low, high = trial.ci or (None, None)
    numbers: dict[str, Any] = {
        rate_name(trial.unit): trial.value,
        SINGLE_RATIO: ratio(trial, baseline),
        STEP_ALONE: trial.device_rate,
        LOADER_ALONE: trial.loader_rate,
        MEMORY: _times(trial.peak_memory_bytes, 2.0**-30),
        "waiting for data percent": _times(trial.data_wait_frac, 100.0),
        "interval/low per second": low,
        "interval/high per second": high,
        "time/start s": trial.start_s,
        **{f"time/{phase} s": trial.phases_s.get(phase) for phase in ("compile", "warmup", "steady")},
        **{objective_name(name, trial.unit): value for name, value in trial.objectives.items() if name in OBJECTIVES},
    }
    more = dict(readable(name, value) for name, value in trial.metrics.items() if isinstance(value, int | float))
    own = shown(numbers)
    return own | {name: value for name, value in shown(more).items() if name not in own}


def ratio(trial: TrialRecord, baseline: TrialRecord | None) -> float | None:
    """Returns a trial's score divided by the baseline's; None if one of them is unknown."""
    return trial.score / baseline.score if trial.score and baseline and baseline.score else None


def study_metrics(summary: Summary) -> dict[str, float]:
    """Returns the metrics of a study's run: baseline, best, their ratio, trials and minutes.

    Before the finals there is no ratio, because the search overstates it.
    """
    baseline, best, speedup = (summary.get(key) or {} for key in ("baseline", "best", "speedup"))
    unit = str(summary.get("unit") or "samples")
    rate = rate_name(unit)
    numbers: dict[str, Any] = {
        f"Best {rate.lower()}": best.get("value"),
        f"baseline {rate.lower()}": baseline.get("value"),
        RATIO: speedup.get("ratio") if speedup.get("num_rounds") or speedup.get("ci") else None,
        "ratio claimed": ((summary.get("verification") or {}).get("claimed") or {}).get("ratio"),
        "minutes": _times((summary.get("seconds") or {}).get("total"), 1 / 60),
        "trials": len(summary.get("trials") or []),
    }
    for name, side in (("baseline", baseline), ("best", best)):
        values = side.get("objectives") or {}
        numbers |= {f"{name} {objective_name(key, unit)}": value for key, value in values.items() if key in OBJECTIVES}
    return shown(numbers)


def best_so_far(trials: list[TrialRecord]) -> list[tuple[int, float]]:
    """Returns (trial number, best score so far) for the trials that may win."""
    curve, best = [], -math.inf
    for trial in trials:
        if trial.outcome.may_win and trial.score is not None and trial.kind in (Kind.baseline, Kind.search):
            best = max(best, trial.score)
            curve.append((trial.number, best))
    return curve


def curves(trials: list[TrialRecord]) -> dict[str, list[tuple[int, float]]]:
    """Returns a study's progress as {metric: [(trial number, score), ...]}: the best score so far, and the baseline's score.

    A curve has a point for each trial, beginning with the first that may win. Returns {} instead of curves of one point.
    """
    scores = dict(best_so_far(trials))
    first = min(scores, default=math.inf)
    later = [trial.number for trial in trials if trial.number >= first]
    if len(later) < 2:
        return {}
    best_name, baseline_name = curve_names(trials[0])
    best = list(accumulate((scores.get(number, -math.inf) for number in later), max))
    found = {best_name: list(zip(later, map(_digits, best), strict=True))}
    if (baseline := trials[0]).kind is Kind.baseline and baseline.score:
        found[baseline_name] = [(number, _digits(baseline.score)) for number in later]
    return found


def curve_names(trial: TrialRecord | None) -> tuple[str, str]:
    """Returns the names of both `curves`. They depend on the study's objective, which is read from any of its trials.

    The names end in "per second" if the score is a rate, and in "score" if it is per joule or per unit of currency.
    """
    unit = "score" if trial and next(iter(trial.scores), "") in (ENERGY, COST) else "per second"
    return f"progress/best {unit}", f"progress/baseline {unit}"


def readable(name: str, value: float) -> tuple[str, float]:
    """Returns a stored number's name and value as MLflow shows them: ("system/gpu power W", 212.0) for gpu.power_w."""
    words, unit, factor = next(
        ((name.removesuffix(end), unit, factor) for end, unit, factor in _UNITS if name.endswith(end)), (name, "", 1.0)
    )
    first = re.match("[a-z]*", name)
    group = GROUPS.get(first[0] if first else "", "")
    text = re.sub(r"[._ ]+", " ", f"{words} {unit}").strip()
    return (f"{group}/{text}" if group else text), value * factor


def shown(numbers: dict[str, Any]) -> dict[str, float]:
    """Returns the finite numbers, rounded to three digits, under names that MLflow accepts."""
    is_known = {key: isinstance(value, int | float) and math.isfinite(value) for key, value in numbers.items()}
    return {mlflow_name(key): _digits(value) for key, value in numbers.items() if is_known[key]}


def mlflow_name(key: str) -> str:
    """Returns a key with the characters that MLflow accepts in names of metrics and params."""
    return re.sub(r"[^\w\-. :/]", "_", key)[:MAX_KEY_CHARACTERS]


def _digits(value: float) -> float:
    return float(number_text(value).replace(",", ""))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
