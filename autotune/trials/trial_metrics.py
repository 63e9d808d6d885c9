"""Computes one trial's numbers from the results of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune import ranks, stats
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, RankResult
from autotune.shapes import clipped

MAX_RANKS = 16  # with more ranks, the tracker gets no metrics of single ranks; `show --json` has them all
_WORST_FIRST = (OVERRIDDEN, NOT_APPLICABLE, APPLIED)


def numbers(results: Sequence[RankResult]) -> dict[str, Any]:
    """Returns the fields of a TrialRecord that come from its ranks' results; {} if no rank wrote a result."""
    if not results:
        return {}
    first, peaks = results[0], [result.memory.get("peak_bytes") for result in results]
    devices = [result.device_rate_per_s for result in ranks.feeding(results)]
    if ranks.leaves_out(first):  # the other ranks may have waited while rank 0 evaluated: its rate is used for all of them
        devices = [first.device_rate_per_s] * len(devices)
    return {
        "value": ranks.rate_per_s(results),
        "ci": interval(results),
        "why_no_ci": why_no_interval(results),
        "unit": first.unit,
        "phases_s": dict(first.phases_s),
        "peak_memory_bytes": max((int(peak) for peak in peaks if peak), default=None),
        "device_rate": _total(devices, results),
        "loader_rate": _total([result.loader_rate_per_s for result in ranks.feeding(results)], results),
        "data_wait_frac": first.data_wait_frac,
        "regime": first.regime,
        "knob_reports": knob_reports(results),
        "losses": losses(results),
        "ranks": ranks.joined(results),
    }


def _total(rates_per_s: Sequence[float | None], results: Sequence[RankResult]) -> float | None:
    """Returns the rate of all ranks together; None if the rate of a rank is unknown."""
    total = stats.sum_known(rates_per_s)
    return None if total is None else total * ranks.share(results)


def interval(results: Sequence[RankResult]) -> stats.Interval | None:
    """Returns the 95 % interval of the rate over all ranks, computed from the rates of the window's blocks.

    Ranks wait for each other at every step, so their errors are not independent. Therefore, the widest interval of a rank is
    used. None if a rank has no interval.
    """
    rate = ranks.rate_per_s(results)
    fracs = [_half_width_frac(result)[0] for result in _with_window(results)]
    if not rate or not fracs or None in fracs:
        return None
    # `rate` may be lower than the rates of the blocks, if the loader limits it. So only the relative width is from the blocks.
    half = rate * max(frac for frac in fracs if frac is not None)
    return (rate - half, rate + half)


def why_no_interval(results: Sequence[RankResult]) -> str:
    """Returns why `interval` returns None, from the first rank that has a reason; "" if it returns an interval."""
    return next((reason for result in _with_window(results) if (reason := _half_width_frac(result)[1])), "")


def _with_window(results: Sequence[RankResult]) -> list[RankResult]:
    """Returns rank 0's result and the results of those other ranks that have a window.

    Returns only rank 0's result if its window leaves out evaluations, because the other ranks may have waited during these.
    """
    is_alone = bool(results) and ranks.leaves_out(results[0])
    return [result for result in results if result is results[0] or (result.window and not is_alone)]


def _half_width_frac(result: RankResult) -> tuple[float | None, str]:
    window = result.window
    return stats.block_half_width_frac(window.block_rates_per_s, window.block_s) if window else (None, "no window was reached")


def losses(results: Sequence[RankResult]) -> list[float | None]:
    """Returns the loss of each of the first steps, averaged over the ranks that have a loss; [] if no rank has one.

    Only the last stage of a pipeline sees a loss. Curves are cut to the length of the shortest.
    """
    curves = [result.loss.get("curve") or [] for result in results if result.loss is not None]
    sums = (stats.sum_known(step) for step in zip(*curves, strict=False))
    return [None if total is None else clipped(total / len(curves)) for total in sums]


def knob_reports(results: Sequence[RankResult]) -> dict[str, dict[str, Any]]:
    """Returns {knob key: report of the rank with the worst status}.

    If only rank 0 fetches batches, the other ranks' reports of loader knobs are ignored: rank 0 sends them their samples.
    """
    worst: dict[str, dict[str, Any]] = {}
    is_first_alone = ranks.only_first_fetches(results)
    for number, result in enumerate(results):
        for key, report in result.knobs.items():
            if number and is_first_alone and key.startswith("loader."):
                continue
            if key not in worst or _badness(report.status) < _badness(worst[key]["status"]):
                worst[key] = dict(vars(report))
    return worst


def metrics(results: Sequence[RankResult], seen: dict[str, float]) -> dict[str, float]:
    """Returns further numbers for the tracker: step times, compilation, and `seen`, the numbers of `MachineWatch`."""
    found = dict(seen)
    if not results:
        return found
    first = results[0]
    gaps = np.diff(np.asarray(first.steps.get("end_s", []), dtype=float))[max(0, int(first.steps.get("warmup", 0)) - 1) :]
    if len(gaps):
        found["step_p50_s"], found["step_p95_s"] = (float(np.percentile(gaps, share)) for share in (50, 95))
    for name, shown in (("graphs", "compiled_graphs"), ("cached", "compiled_cached"), ("seconds", "compile_s")):
        if isinstance(first.compiled.get(name), int | float):
            found[shown] = float(first.compiled[name])
    found |= _of_ranks(ranks.joined(results))
    if first.window:
        found["window_s"], found["window_steps"] = first.window.seconds, float(first.window.steps)
        if first.window.cycles:
            found["window_cycles"] = float(first.window.cycles)
        if seen.get("gpu.energy_j") and seen.get("gpu.energy_s") and first.window.rate_per_s:
            # This divides power by rate, not energy by samples, because the counter was not read exactly at the window's ends.
            num_devices = _devices_per_rank(results) * first.ranks_per_batch
            power_w = seen["gpu.energy_j"] / seen["gpu.energy_s"] * num_devices
            found["gpu.energy_per_sample_j"] = power_w / first.window.rate_per_s
    return found


def _devices_per_rank(results: Sequence[RankResult]) -> float:
    """Returns the number of GPUs divided by the number of ranks: less than 1 if ranks share a GPU, more if a rank uses two."""
    known = [uuids for result in results if (uuids := result.facts.get("device_uuids"))]
    return len({uuid for uuids in known for uuid in uuids}) / len(known) if known else 1.0


def cycle(result: RankResult) -> dict[str, float]:
    """Returns the mean steps and seconds of a cycle, as in `Spec.cycle`; {} if the rank's steps do not come in cycles.

    A cycle lasts from one regular pause, such as a validation, to the next.
    """
    window = result.window
    if window is None or not window.cycles:
        return {}
    return {"steps": window.steps / window.cycles, "seconds": window.seconds / window.cycles}


def _of_ranks(joined: dict[str, Any]) -> dict[str, float]:
    """Returns metrics of several ranks together, and of each as `rank1.NAME` if there are at most MAX_RANKS."""
    if not joined:
        return {}
    communication = joined["communication"] or {}
    numbers = {
        "ranks": joined["world_size"],
        "rank_skew_frac": joined["skew_frac"],
        **{f"communication.{name}": value for name, value in communication.items()},
    }
    for entry in joined["by_rank"] if joined["world_size"] <= MAX_RANKS else ():
        numbers |= {f"rank{entry['rank']}.{name}": value for name, value in entry.items() if name not in ("rank", "host")}
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _badness(status: str) -> int:
    return _WORST_FIRST.index(status) if status in _WORST_FIRST else 0
