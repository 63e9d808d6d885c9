"""Computes after how many samples a slower start pays off, and how long a training must be to repay the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.knobs.loader import BATCH_SIZE
from autotune.knobs.step import ACCUMULATION, own_accumulation
from autotune.records import ENERGY, TIME, Kind, Summary, TrialRecord, objective_names
from autotune.trials.objective import COMPILE_KEY, COMPILE_OFF, ColdCompiles, fixed_s

# A start counts as slower if it takes at least MIN_DEARER_S and at least MIN_DEARER_FRAC longer. Starts of one program vary by
# two seconds, and long starts vary by more.
MIN_DEARER_S = 2.0
MIN_DEARER_FRAC = 0.2  # share of the baseline's start


def break_even(
    records: Sequence[TrialRecord],
    own: Sequence[TrialRecord],
    other: Sequence[TrialRecord],
    *,
    batches_per_step: float | None = None,
) -> dict[str, Any] | None:
    """Returns N, the number of samples after which a slower start pays off, and related numbers.

    T(N) = start + compile + N / throughput is the time to train on N samples. At the returned N, the configuration and the
    baseline take equally long. Returns None if the configuration does not start more slowly than the baseline.

    Args:
        records: all trials; search trials show what compiling costs without a cache.
        own: measurements of the configuration, in fresh processes.
        other: measurements of the baseline.
        batches_per_step: number of batches that the baseline used in a step; None if unknown.

    Returns:
        A dict. If the configuration is not faster, its start never pays off, and samples, steps and seconds are None.
        samples: N.
        steps: N in steps of the configuration; None if unknown.
        seconds: T(N).
        dearer_s: how many seconds longer the start takes.
        compile_s: compile time without a cache, as measured in the search.
    """
    first = own[0]
    start_s, rate = _typical(records, own)
    base_s, base_rate = _typical(records, other)
    dearer_s = start_s - base_s
    if dearer_s < max(MIN_DEARER_S, MIN_DEARER_FRAC * base_s) or not rate or not base_rate:
        return None
    gain_s = 1 / base_rate - 1 / rate  # per sample
    samples = dearer_s / gain_s if gain_s > 0 else None
    step_samples = _step_samples(first, own_accumulation(batches_per_step, other[0].knobs))
    is_compiled = first.knobs.get(COMPILE_KEY, COMPILE_OFF) != COMPILE_OFF
    return {
        "samples": samples,
        "steps": samples / step_samples if samples and step_samples else None,
        "seconds": base_s + samples / base_rate if samples else None,
        "dearer_s": dearer_s,
        "compile_s": ColdCompiles(records).seconds(first.knobs) if is_compiled else None,
    }


def search_cost(
    records: Sequence[TrialRecord],
    *,
    seconds: float,
    speedup: Summary | None,
    is_kept: bool,
    dearer_s: float,
    objective: str | list[str],
) -> dict[str, Any]:
    """Returns what the study cost, and how long a training must be for the best configuration to repay it.

    A training that takes T with the baseline takes T / ratio with the best configuration. The study pays off if the difference
    is at least its cost, that is, if T is at least (seconds + dearer_s) * ratio / (ratio - 1). The ratio is from the finals'
    pairs.

    Args:
        records: all trials.
        seconds: wall time of the study, including the finals.
        speedup: `speedup` of the summary; None if nothing was compared with the baseline.
        is_kept: whether the baseline is kept.
        dearer_s: how many seconds longer the best configuration takes to start; ignored if the objective is
            time_for_samples, because the ratio then contains the start.
        objective: the study's objective or objectives.

    Returns:
        A dict.
        seconds: as given.
        trials: number of search trials.
        repaid_after_s: the smallest T that pays off; None if unknown or if none does.
        ci: T at the upper and the lower end of the ratio's interval; None for an end at which the study is never repaid.
        why_not: why there is no T, as "never: ..." or "not known: ..."; "" if there is a T.
    """
    found: dict[str, Any] = {
        "seconds": seconds,
        "trials": sum(record.kind is Kind.search for record in records),
        "repaid_after_s": None,
        "ci": None,
        "why_not": "",
    }
    if speedup is None or is_kept:
        is_open = speedup is not None and speedup["verdict"] == "ambiguous" and speedup.get("overrides")
        why_not = (
            "not known: the measurements do not show whether anything is faster"
            if is_open
            else "never: nothing faster was found"
        )
        return {**found, "why_not": why_not}
    ratio, interval, name = speedup.get("ratio"), speedup.get("ci"), objective_names(objective)[0]
    if name == ENERGY:
        return {**found, "why_not": "not known: the gain is energy, not time"}
    if ratio is None or interval is None:
        return {**found, "why_not": "not known: the finals give no interval"}
    if ratio <= 1:
        return {**found, "why_not": "never: the best is no faster"}
    cost_s = seconds + (0.0 if name == TIME else max(0.0, dearer_s))

    def repaid_s(speed: float) -> float | None:
        return cost_s * speed / (speed - 1) if speed > 1 else None

    low, high = interval
    return {**found, "repaid_after_s": repaid_s(ratio), "ci": [repaid_s(high), repaid_s(low)]}


def _step_samples(record: TrialRecord, times: int) -> float:
    """Returns the samples that all ranks use in a step; 0 if unknown. The program accumulates `times` batches by itself."""
    batch = record.knobs.get(BATCH_SIZE.key)
    if record.unit != "samples" or not isinstance(batch, int):
        return 0.0
    if by_rank := record.ranks.get("by_rank"):
        return (record.value or 0.0) * max(rank["step_s"] or 0.0 for rank in by_rank)
    return batch * times * float(record.knobs.get(ACCUMULATION.key, 1))


def _typical(records: Sequence[TrialRecord], measured: Sequence[TrialRecord]) -> tuple[float, float]:
    """Returns (seconds until training reaches its rate, rate per second), medians over fresh processes."""
    cold_s = ColdCompiles(records).seconds(measured[0].knobs)
    starts = [fixed_s(record, cold_s) for record in measured]
    return float(np.median(starts)), float(np.median([record.value or 0.0 for record in measured]))
