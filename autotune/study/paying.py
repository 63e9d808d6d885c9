"""When a dearer start pays: after how many samples a configuration that starts slowly has caught up with the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.records import Knobs, TrialRecord
from autotune.study.objective import COMPILE_KEY, COMPILE_OFF, cold_compile_s, fixed_s

MIN_DEARER_S = 2.0  # starts of one program differ by as much from process to process
MIN_DEARER_FRAC = 0.2  # of the baseline's start: a start of a minute differs by more than two seconds


def break_even(
    records: Sequence[TrialRecord], own: Sequence[TrialRecord], other: Sequence[TrialRecord]
) -> dict[str, Any] | None:
    """Returns when T(N) = start + compile + N / throughput meets the baseline's; None when the start is no dearer.

    Args:
        records: all trials: the search's hold what compiling costs when nothing is cached.
        own: measurements of the configuration, in fresh processes.
        other: measurements of the baseline.

    Returns:
        samples: N; steps: the same in steps of the configuration's batch, None unknown; seconds: T(N); dearer_s: what the start
        costs more; compile_s: of that, compiling with nothing cached, as the search saw it; None of samples, steps and seconds
        when it never pays, because the configuration is not faster.
    """
    first = own[0]
    start_s, rate = _typical(records, own)
    base_s, base_rate = _typical(records, other)
    dearer_s = start_s - base_s
    if dearer_s < max(MIN_DEARER_S, MIN_DEARER_FRAC * base_s) or not rate or not base_rate:
        return None
    gain_s = 1 / base_rate - 1 / rate  # per sample
    samples = dearer_s / gain_s if gain_s > 0 else None
    batch = step_batch(first.knobs)
    is_counted = first.unit == "samples"
    is_compiled = first.knobs.get(COMPILE_KEY, COMPILE_OFF) != COMPILE_OFF
    return {
        "samples": samples,
        "steps": samples / float(batch) if samples and is_counted and batch else None,
        "seconds": base_s + samples / base_rate if samples else None,
        "dearer_s": dearer_s,
        "compile_s": cold_compile_s(records, first.knobs) if is_compiled else None,
    }


def step_batch(knobs: Knobs) -> int | None:
    """Returns the samples that a rank's step holds as far as knobs say: batch size times accumulation; None unknown."""
    batch = knobs.get("loader.batch_size")
    return batch * int(knobs.get("step.accumulation", 1)) if isinstance(batch, int) else None


def _typical(records: Sequence[TrialRecord], measured: Sequence[TrialRecord]) -> tuple[float, float]:
    """Returns (seconds before it trains at its rate, rate per second), medians over fresh processes."""
    cold_s = cold_compile_s(records, measured[0].knobs)
    starts = [fixed_s(record, cold_s) for record in measured]
    return float(np.median(starts)), float(np.median([record.value or 0.0 for record in measured]))
