"""Estimates how much measurements of the same configuration vary on this machine from process to process.

The finals measure the baseline and the winner in pairs. An interval that is computed from two or three pairs alone is very
wide. But other measurements of a study also show the spread: the rounds that choose the winner, the ablation rounds, and the
search. A round measures several configurations once. The search is treated as one more round, in which the configurations of
the other rounds were measured. Earlier studies on the same machine add evidence, too. All evidence is pooled, weighted by
degrees of freedom.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from autotune import stats
from autotune.compare.interleaving import Pair
from autotune.records import Kind, TrialRecord
from autotune.stats import Noise
from autotune.trials.configurations import SEARCHED, configuration_key
from autotune.trials.health import ACCEPTED

# Limits on the degrees of freedom that evidence may add.
# For this study's rounds except the pairs. Eight pairs have 7 degrees of freedom, so the spread of the pairs has more weight.
MAX_FREEDOM = 6.0
SAME_PROGRAM_FREEDOM = 4.0  # for earlier studies of the same program on this machine
OTHER_PROGRAM_FREEDOM = 2.0  # for studies of other programs, whose noise may be half or twice as large
# Used in plans and estimates until a configuration has been measured twice, but never in the verdict. Development machines had
# 1 to 5 %.
UNKNOWN_NOISE = Noise(spread=0.03, freedom=2.0)
# Replaces UNKNOWN_NOISE if the GPU sets the pace. On an H200, three processes of GPT-2 small differed by 0.1 % in one
# configuration and by 0.3 % in another. If the GPU waits for its host or for input, rates vary as much as on a CPU
# (measured: by 3.9 %).
BUSY_GPU_NOISE = Noise(spread=0.01, freedom=2.0)
BUSY_GPU_FRAC = 0.95  # a GPU sets the pace if a kernel runs for at least this share of the time

Round = Mapping[Hashable, float]


def rounds_of(records: Sequence[TrialRecord]) -> list[Round]:
    """Returns the rounds in which configurations were measured next to each other, as dicts from configuration to score.

    The rounds of finals and ablation include measurements that may not win (unsteady, or of a configuration that violates a
    constraint), because the pairs of the verdict include them, too. The search is one round of the configurations that were
    measured again. Its measurements are shorter, so they tend to increase the estimated spread. If the study accepted a
    disturbance of the machine (`health.Level`) during the search, this round has only the later rates, because earlier rates
    are not comparable.
    """
    found: dict[Hashable, dict[Hashable, float]] = {}
    for record in records:
        if record.kind in (Kind.final, Kind.attribution) and record.score:
            key = (record.kind, record.why if record.kind is Kind.final else record.origin, record.round)
            found.setdefault(key, {})[configuration_key(record.changed)] = record.score
    again = {arm for measured in found.values() for arm in measured}
    first = [record for record in records if record.kind in SEARCHED]
    since, searched = comparable_since(records), dict[Hashable, float]()
    for record in first:
        arm = configuration_key(record.changed)
        if record.number >= since and record.score and record.outcome.may_win and arm in again:
            searched[arm] = record.score  # replaces an earlier rate: only a doubtful rate is measured again
    return [measured for measured in (searched, *found.values()) if len(measured) > 1]


def comparable_since(records: Sequence[TrialRecord]) -> int:
    """Returns the number of the first trial whose rate is comparable with the rates of all later search trials; 0 if all are.

    From the moment at which a study accepts a disturbance (see `health.Level`), rates are not comparable with earlier rates.
    """
    return max((record.number for record in records if record.kind in SEARCHED and record.evidence.get(ACCEPTED)), default=0)


def noise_of(rounds: Sequence[Round]) -> Noise | None:
    """Returns the spread within some rounds; None if they have no degrees of freedom."""
    reference = next((arm for measured in rounds for arm in measured), None)
    return stats.compare_rounds(rounds, reference).noise if rounds else None


def known_noise(records: Sequence[TrialRecord], earlier: Noise | None) -> Noise | None:
    """Returns the spread of one measurement, from a study's rounds and from earlier studies; None if unknown."""
    return stats.pooled([noise_of(rounds_of(records)), earlier])


def assumed_noise(records: Sequence[TrialRecord]) -> Noise:
    """Returns the spread to assume for some configurations until one of them has been measured twice."""
    is_busy = all((record.metrics.get("gpu.utilisation_frac") or 0.0) >= BUSY_GPU_FRAC for record in records)
    return BUSY_GPU_NOISE if records and is_busy else UNKNOWN_NOISE


def noise_besides(pairs: Sequence[Pair], rounds: Sequence[Round], earlier: Noise | None = None) -> Noise | None:
    """Returns the spread of one measurement, from earlier studies and from all rounds except the given pairs.

    The pairs must be among the rounds, because their sum of squares is subtracted from that of all rounds.
    """
    every = noise_of(rounds)
    if every is None:
        return earlier
    own = stats.compare_rounds([dict(enumerate(pair)) for pair in pairs], 0).noise
    freedom = every.freedom - (own.freedom if own else 0.0)
    if freedom <= 0:
        return earlier
    left = every.freedom * every.spread**2 - (own.freedom * own.spread**2 if own else 0.0)
    rest = Noise(spread=max(0.0, left / freedom) ** 0.5, freedom=freedom)
    return stats.pooled([rest.capped(MAX_FREEDOM), earlier])


def as_json(noise: Noise | None) -> dict[str, Any] | None:
    """Returns a spread as stored in summary.json and study.json."""
    return None if noise is None else {"spread": noise.spread, "freedom": noise.freedom}


def from_json(stored: Mapping[str, Any] | None) -> Noise | None:
    """Returns a stored spread; None if it is missing or invalid."""
    try:
        found = Noise(spread=float(stored["spread"]), freedom=float(stored["freedom"])) if stored else None
    except (KeyError, TypeError, ValueError):
        return None
    return found if found and found.spread > 0 and found.freedom > 0 else None
