"""Compares strategies over replayed studies: figures by trials and by seconds, costs, memory, calibration."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from autotune.records import Outcome
from autotune.replay.bench import Result
from autotune.replay.study import Claim, Replayed, Step
from autotune.replay.table import Key, Measurement
from autotune.replay.world import mean, optimum_of, worth

SCHEMA = 1
AT_TRIALS = (10, 20, 40)
TARGETS = (0.95, 0.98)  # fractions of the optimum; some figures say how long a search takes to reach them
WORTH_FRAC = 0.85  # if `random_after_ten` exceeds this fraction of the optimum, strategies hardly differ: the table is too easy
NEAR_CAP_FRAC = 0.8  # if the optimum fills less than this share of the memory, avoiding large configurations loses nothing
LOSS_FRAC = 0.005  # minimum difference between two strategies that counts, as a fraction of the optimum


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Returns all figures of a replay as plain values: the document of `autotune replay --json`.

    Args:
        results: at least one, with at least one study of each strategy.
    """
    tables = [_table(result) for result in results]
    names = list(results[0].studies)
    together = {name: _strategy([(result, result.studies[name]) for result in results]) for name in names}
    for name, found in together.items():
        found["worst_table"] = _worst(tables, name)
    return {"schema": SCHEMA, "tables": tables, "strategies": together, "losses": _losses(tables, names)}


def _losses(tables: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the cases in which another strategy's median exceeds that of the first strategy by more than LOSS_FRAC.

    A case is a table, a rival and a number n of AT_TRIALS. The medians are taken after the time that the baseline and n trials
    need on average.
    """
    found = []
    for table in tables:
        own = table["strategies"][names[0]]["at_seconds_of_trials"]
        for rival in names[1:]:
            for num, other in table["strategies"][rival]["at_seconds_of_trials"].items():
                if own[num]["median"] < other["median"] - LOSS_FRAC:
                    behind = {"own": own[num]["median"], "other": other["median"]}
                    found.append({"table": table["table"], "strategy": names[0], "rival": rival, "trials": int(num), **behind})
    return found


def _table(result: Result) -> dict[str, Any]:
    table, groups = result.table, result.table.by_configuration()
    kept = _kept(result)
    optimum = optimum_of(kept)
    best, base = mean(kept[optimum]), mean(groups.get(frozenset(), []))
    ten = random_after_ten(kept)
    return {
        "table": table.workload,
        "file": result.path.name,
        "configurations": len(kept),
        "recorded": len(groups),
        "disturbed": sum(one.is_disturbed for one in table.measurements),
        "repeats": statistics.median(len(group) for group in kept.values()),
        "measured_once": sum(sum(bool(one.value) for one in group) == 1 for group in kept.values()),
        "spread_frac": _spread_frac(kept.values()),
        "unit": table.unit,
        "optimum": {
            "changed": kept[optimum][0].changed,
            "value": best,
            "over_baseline": best / base if best and base else None,
        },
        "random_after_10": ten,
        "is_worth": ten <= WORTH_FRAC,
        "memory": _memory(kept, optimum, table.memory_bytes),
        "seconds_per_trial": _seconds_per_trial(kept),
        "strategies": {name: _strategy([(result, studies)]) for name, studies in result.studies.items()},
    }


def random_after_ten(groups: dict[Key, list[Measurement]]) -> float:
    """Returns the best rate among ten random configurations and the baseline, as a fraction of the optimum's rate.

    This is the exact median over all draws without replacement. A configuration's rate is the mean over its repeats. There
    are C(N, n) draws of n out of N configurations. In C(k, n) of these draws, the best rate is at most the k-th smallest rate.
    """
    rates = {key: worth(group) for key, group in groups.items()}
    others = sorted(rate for key, rate in rates.items() if key)
    num = min(AT_TRIALS[0], len(others))
    half = math.comb(len(others), num) / 2
    median = next((rate for k, rate in enumerate(others, 1) if math.comb(k, num) >= half), 0.0)
    return max(median, rates.get(frozenset(), 0.0)) / rates[optimum_of(groups)]


def _memory(groups: dict[Key, list[Measurement]], optimum: Key, memory_bytes: int | None) -> dict[str, Any]:
    """Returns how many configurations run out of memory, and what share of the memory the optimum fills (None if unknown)."""
    num = sum(any(one.outcome.is_memory for one in group) for group in groups.values())
    peaks = [int(result.get("memory", {}).get("peak_bytes") or 0) for one in groups[optimum] for result in one.results]
    used = max(peaks, default=0) / memory_bytes if memory_bytes and max(peaks, default=0) else None
    return {"out_of_memory": num, "optimum_frac": used, "is_near_cap": bool(num and used and used >= NEAR_CAP_FRAC)}


def _spread_frac(groups: Iterable[Sequence[Measurement]]) -> float | None:
    """Returns the median over configurations of the relative standard deviation of repeats; None without repeats."""
    spreads = []
    for group in groups:
        rates = [one.value for one in group if one.value]
        if len(rates) > 1:
            spreads.append(statistics.stdev(rates) / statistics.mean(rates))
    return statistics.median(spreads) if spreads else None


def _seconds_per_trial(groups: dict[Key, list[Measurement]]) -> float:
    return statistics.mean(one.seconds for group in groups.values() for one in group)


def _strategy(studied: Sequence[tuple[Result, Sequence[Replayed]]]) -> dict[str, Any]:
    """Returns the figures of one strategy over all studies of one table, or of several."""
    each_s = [_seconds_per_trial(_kept(result)) for result, _ in studied]
    timed = [(study, seconds) for seconds, (_, found) in zip(each_s, studied, strict=True) for study in found]
    studies = [study for study, _ in timed]
    claims = [study.claim for study in studies if study.claim]
    return {
        "studies": len(studies),
        "at_trials": {str(num): _spread([at_trials(study.path, num) for study in studies]) for num in AT_TRIALS},
        "at_seconds_of_trials": {
            str(num): _spread([at_seconds(study.path, (num + 1) * seconds) for study, seconds in timed]) for num in AT_TRIALS
        },
        "to": {str(target): _reach(studies, target) for target in TARGETS},
        "final": _spread([study.final_fraction for study in studies]),
        "needless_frac": sum(bool(study.needless) for study in studies) / len(studies),
        "out_of_memory_frac": {str(num): _share(studies, num, lambda outcome: outcome.is_memory) for num in AT_TRIALS},
        "failed_frac": {
            str(num): _share(studies, num, lambda outcome: not (outcome.is_memory or outcome.has_value)) for num in AT_TRIALS
        },
        "calibration": _calibration(claims),
        "seconds": statistics.median(study.total_s for study in studies),
        "own_seconds": statistics.median(study.own_s for study in studies),
        "trials": statistics.median(len(study.steps) - 1 for study in studies),
    }


def _share(studies: Sequence[Replayed], num: int, is_one: Callable[[Outcome], bool]) -> float:
    """Returns the share of the first `num` search trials whose outcome satisfies `is_one`."""
    ended = [is_one(step.outcome) for study in studies for step in study.steps[1 : num + 1]]
    return sum(ended) / len(ended) if ended else 0.0


def _kept(result: Result) -> dict[Key, list[Measurement]]:
    groups = result.table.by_configuration()
    return {key: groups[key] for key in result.grid.keys}


def at_trials(steps: Sequence[Step], num: int) -> float:
    """Returns the fraction of the optimum that a search had reached after `num` trials; 0 before the baseline."""
    return next((step.fraction for step in reversed(steps) if step.trials <= num), 0.0)


def at_seconds(steps: Sequence[Step], seconds: float) -> float:
    """Returns the fraction of the optimum that a search had reached after `seconds` recorded seconds; 0 before the baseline."""
    return next((step.fraction for step in reversed(steps) if step.seconds <= seconds), 0.0)


def _reach(studies: Sequence[Replayed], target: float) -> dict[str, Any]:
    """Returns the trials and seconds until a fraction of the optimum is reached: median and 90th percentile, None for never.

    The true rate of the configuration that looks best so far can fall. So a fraction counts as reached only at the step from
    which this rate stays at or above the fraction. Trials of choosing rounds and attribution count like trials of the search.
    """
    firsts = [reached(study.path, target) for study in studies]
    return {
        "reached_frac": sum(first is not None for first in firsts) / len(firsts),
        "trials": _quantiles([None if first is None else first.trials for first in firsts]),
        "seconds": _quantiles([None if first is None else first.seconds for first in firsts]),
    }


def reached(steps: Sequence[Step], target: float) -> Step | None:
    """Returns the step from which a study stays at or above `target` to its end; None if it ends below."""
    found = None
    for step in reversed(steps):
        if step.fraction < target:
            break
        found = step
    return found


def _quantiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """Returns median and 90th percentile; None counts as infinity, and infinity is returned as None."""
    ordered = sorted(float("inf") if value is None else float(value) for value in values)
    places = {"median": 0.5, "p90": 0.9}
    found = {name: ordered[min(len(ordered) - 1, int(np.ceil(share * len(ordered))) - 1)] for name, share in places.items()}
    return {name: None if value == float("inf") else value for name, value in found.items()}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": float(np.median(values)),
        "p10": float(np.quantile(values, 0.1)),
        "mean": float(np.mean(values)),
    }


def _calibration(claims: Sequence[Claim]) -> dict[str, Any]:
    """Returns how well the verdicts are calibrated."""
    inside = [claim.is_truth_inside for claim in claims if claim.is_truth_inside is not None]
    verified = [claim.is_verified for claim in claims if claim.is_verified is not None]
    return {
        "claims": len(claims),
        "overstated_frac": statistics.median(claim.overstated_frac for claim in claims) if claims else None,
        "truth_inside_frac": sum(inside) / len(inside) if inside else None,
        "verifiable": len(verified),
        "verified": sum(verified),
        "verified_frac": sum(verified) / len(verified) if verified else None,
        "no_longer_holds_frac": sum(claim.verdict == "no longer holds" for claim in claims) / len(claims) if claims else None,
    }


def _worst(tables: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Returns the table on which a strategy is furthest from the optimum after 20 trials, in the median."""
    worst = min(tables, key=lambda table: table["strategies"][name]["at_trials"]["20"]["median"])
    return {"table": worst["table"], "median_at_20": worst["strategies"][name]["at_trials"]["20"]["median"]}


def raw(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Returns every study as plain values, from which other figures can be computed."""
    return [
        {"table": result.table.workload, "strategy": name, "seed": seed, **dataclasses.asdict(study)}
        for result in results
        for name, studies in result.studies.items()
        for seed, study in enumerate(studies)
    ]
