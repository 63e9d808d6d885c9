"""Combines several ranks into one trial: their joint rate, stragglers, and the cost of communication.

Ranks run in lockstep: at each step they wait for each other in the collectives that average the gradients. So a trial is as
fast as its slowest rank, and steps take about equally long on all ranks. A slow rank differs only in waiting less.
Processes that train one model in shared memory do not wait for each other (harness/peers.py): their rates add up.
A window is the series of steps after warm-up over which a rank measures its rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from autotune.harness.protocol import RankResult

LOADER = "loader"  # `RankResult.unit_source` of a rank whose samples come from a DataLoader
# There are stragglers if one rank's own work takes longer than another's by at least this share of a step. Established
# profilers call a loss of this share or more "moderate".
STRAGGLER_FRAC = 0.05
MAX_STRAGGLER_WAIT_FRAC = 0.25  # a rank that waits in collectives for a larger share of a step is not a straggler
# A window counts as consecutive steps, with no evaluation between them, if its length differs by less than this share from the
# sum of its steps' durations. Rounding makes a smaller difference, an evaluation a larger one.
SAME_FRAC = 0.01


class Pace(NamedTuple):
    """A rank's average step.

    Attributes:
        step_s: seconds per step.
        samples: samples (or other work units) per step.
    """

    step_s: float
    samples: float


def pace(result: RankResult, first: RankResult) -> Pace | None:
    """Returns a rank's mean step; None if the rank has no steps to average over.

    The ranks' windows begin some steps apart, so all ranks use the steps of rank 0's window, even a rank whose steps varied too
    much for a window of its own. If evaluations lie between these steps, each rank uses its own window instead, because windows
    leave evaluations out. If rank 0 alone evaluates, the windows of the other ranks contain the wait for rank 0, so all ranks
    use the step time of rank 0.
    """
    window, lasting_frac = result.window, 1.0
    if window is not None:
        if not window.steps or result.throughput_per_s is None:
            return None
        if not result.throughput_per_s > 0:  # NaN is not a rate, either
            return Pace(window.seconds / window.steps, 0.0)
        # Share of the rate that the loader can sustain. The rest came from a queue of batches that was filled earlier.
        lasting_frac = result.throughput_per_s / window.rate_per_s if window.rate_per_s else 1.0
    is_common = result.world_size > 1 and not result.is_at_own_pace and (window is None or _is_whole(first))
    step = _over_window_of(first, result) if is_common else None
    if step is None and window is not None:
        step = Pace(window.seconds / window.steps, window.samples / window.steps)
    if step is not None and first.window is not None and leaves_out(first):
        step = step._replace(step_s=first.window.seconds / first.window.steps)
    return None if step is None else Pace(step.step_s / lasting_frac, step.samples)


def _over_window_of(first: RankResult, result: RankResult) -> Pace | None:
    """Returns a rank's mean step over the steps of rank 0's window; None if the rank has not made all of them."""
    if first.window is None:
        return None
    begin, steps = int(first.steps.get("warmup", 0)), result.steps
    ends_s, samples = steps.get("end_s") or [], steps.get("samples") or []
    end = begin + first.window.steps
    if not begin < end <= min(len(ends_s), len(samples)):
        return None
    seconds = ends_s[end - 1] - (ends_s[begin - 1] if begin else 0.0)
    return Pace(seconds / (end - begin), sum(samples[begin:end]) / (end - begin))


def leaves_out(first: RankResult) -> bool:
    """Whether the window of rank 0 leaves out an evaluation. The other ranks' windows then may contain a wait for rank 0."""
    is_whole = _over_window_of(first, first) is None or _is_whole(first)
    return not first.is_at_own_pace and not is_whole


def _is_whole(first: RankResult) -> bool:
    """Whether the steps of rank 0's window are consecutive (no evaluation between them), so that all ranks can use them."""
    whole, window = _over_window_of(first, first), first.window
    return whole is not None and window is not None and abs(whole.step_s * window.steps / window.seconds - 1) < SAME_FRAC


def rate_per_s(results: Sequence[RankResult]) -> float | None:
    """Returns the samples of all ranks in a step, divided by the slowest rank's step time; None if a rank's pace is unknown.

    If the ranks step at their own pace, returns the sum of their rates. A batch on which several ranks train counts once.
    """
    if len(results) == 1:
        return results[0].throughput_per_s
    if any(result.is_at_own_pace for result in results):
        rates = [result.throughput_per_s for result in results if result.window is not None]
        return sum(rate for rate in rates if rate is not None) if len(rates) == len(results) and None not in rates else None
    paces = [pace(result, results[0]) for result in results]
    known = [each for each in paces if each is not None]
    if not known or len(known) < len(paces):
        return None
    samples = sum(each.samples for each in known[: len(feeding(results))]) * share(results)
    return samples / max(each.step_s for each in known)


def feeding(results: Sequence[RankResult]) -> Sequence[RankResult]:
    """Returns the ranks whose samples count: all ranks, or rank 0 alone if all ranks train on its batch.

    All ranks train on one batch if the model is split over all of them, or if only rank 0 fetches batches.
    """
    return results[:1] if only_first_fetches(results) or results[0].ranks_per_batch == len(results) else results


def only_first_fetches(results: Sequence[RankResult]) -> bool:
    """Whether only rank 0 fetches from a loader, and sends the others their samples.

    Accelerate reads streams in this way (`dispatch_batches`), and so do pipelines of several stages.
    """
    return results[0].unit_source == LOADER and all(result.unit_source != LOADER for result in results[1:])


def share(results: Sequence[RankResult]) -> float:
    """Returns the factor by which the samples of the ranks from `feeding` are multiplied: below 1 if several share a batch."""
    return 1.0 if len(feeding(results)) == 1 else 1 / results[0].ranks_per_batch


def joined(results: Sequence[RankResult]) -> dict[str, Any]:
    """Returns a summary of several ranks; {} for one.

    {"world_size", "skew_frac", "stragglers": [rank, ...], "communication": {...}, "by_rank": [{"rank", "host", "step_s",
    "rate_per_s", "own_s", "exposed_s", "data_wait_frac", "peak_memory_bytes"}, ...]}; an unknown value is None, an unknown
    host "". `exposed_s` is the time that a rank waits in collectives in each step, and `own_s` is the rest of the step.
    `skew_frac` is the longest `own_s` minus the shortest, as a share of a step. The rank that enters a collective last waits
    for no other rank, so the shortest wait is the cost of communication itself. Any longer wait is due to stragglers.
    """
    if len(results) < 2:
        return {}
    by_rank = [_of_rank(result, results[0]) for result in results]
    own_s = [entry["own_s"] for entry in by_rank]
    step_s = max((entry["step_s"] for entry in by_rank if entry["step_s"]), default=None)
    skew_frac = (max(own_s) - min(own_s)) / step_s if step_s and None not in own_s else None
    is_skewed = skew_frac is not None and skew_frac >= STRAGGLER_FRAC
    return {
        "world_size": results[0].world_size,
        "skew_frac": skew_frac,
        "stragglers": [entry["rank"] for entry in by_rank if is_skewed and step_s and _is_late(entry, own_s, step_s)],
        "communication": _communication(results, by_rank, step_s),
        "by_rank": by_rank,
    }


def _is_late(entry: dict[str, Any], own_s: Sequence[float], step_s: float) -> bool:
    """Whether other ranks wait for this rank: its own work takes longer than theirs, and it does not wait long itself."""
    waits_long = entry["exposed_s"] >= MAX_STRAGGLER_WAIT_FRAC * step_s
    return not waits_long and bool(entry["own_s"] > (max(own_s) + min(own_s)) / 2)


def _of_rank(result: RankResult, first: RankResult) -> dict[str, Any]:
    own, exposed_s = pace(result, first), result.communication.get("exposed_s")
    peak = result.memory.get("peak_bytes")
    return {
        "rank": result.rank,
        "host": result.host,
        "step_s": own.step_s if own else None,
        "rate_per_s": own.samples / own.step_s if own else None,
        "own_s": max(0.0, own.step_s - exposed_s) if own and exposed_s is not None else None,
        "exposed_s": exposed_s,
        "data_wait_frac": result.data_wait_frac,
        "peak_memory_bytes": int(peak) if peak else None,
    }


def _communication(
    results: Sequence[RankResult], by_rank: Sequence[dict[str, Any]], step_s: float | None
) -> dict[str, Any] | None:
    """Returns the cost of communication per step and its bound; None if not measured.

    {"exposed_s", "exposed_frac", "gradient_bytes", "bandwidth_bytes_per_s", "bound_s"}. The bound is the time to average all
    gradients while nothing else runs: gradient bytes divided by the bandwidth, which was measured with the ranks idle. If the
    cost is below the bound, communication overlaps with the backward pass. If the cost is far above the bound, something else
    delays communication.
    """
    waits_s = [entry["exposed_s"] for entry in by_rank]
    if None in waits_s:
        return None
    measured = [result.communication for result in results]
    gradient_bytes = max(int(each.get("gradient_bytes") or 0) for each in measured)
    known = [each["bandwidth_bytes_per_s"] for each in measured if each.get("bandwidth_bytes_per_s")]
    bandwidth = min(known) if len(known) == len(measured) else None
    return {
        "exposed_s": min(waits_s),
        "exposed_frac": min(waits_s) / step_s if step_s else None,
        "gradient_bytes": gradient_bytes,
        "bandwidth_bytes_per_s": bandwidth,
        "bound_s": gradient_bytes / bandwidth if bandwidth else None,
    }
