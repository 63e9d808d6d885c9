"""Rules of the finals, as pure functions of the trials: which trials are finalists, which one is chosen, and the verdict.

So a resumed study decides from its stored trials exactly as an uninterrupted study would.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autotune import stats
from autotune.compare.interleaving import Pair
from autotune.records import Kind, Outcome, Tier, TrialRecord
from autotune.trials.configurations import configuration_key

MAX_FINALISTS = 3
CONTENDER_FRAC = 0.85  # minimum value of a finalist, as a share of the best value: noise alone does not explain a larger gap
# Replaces CONTENDER_FRAC for a configuration if a configuration with only some of its changes was as fast. In replays, a limit
# of 0.95 found the best configuration in 86 % of cases, a limit of 0.85 in 76 %.
NEAR_FRAC = 0.95
MIN_GAIN_FRAC = 0.97  # minimum value of a finalist, as a share of the baseline's value
DEAR_FACTOR = 5.0  # a trial counts as compiling, unlike another trial, if its compile phase takes this many times as long
DEAR_GAIN_FRAC = 0.03  # minimum gain in the search that justifies a compilation in every round of the finals
LIKELY_CONFIDENCE = 0.8  # an unproven finalist is exported only if a two-sided interval of this confidence excludes a loss
# Gain that a single round must show if there is no interval: three standard deviations of the difference between two runs with
# 3.5 % noise each.
ONE_ROUND_FRAC = 0.15


@dataclass(kw_only=True)
class Decision:
    """The result of the finals.

    Attributes:
        finalist: search trial that was chosen and reported; None if no configuration came close to the baseline.
        ratio: finalist over baseline, from the rounds after the finalist was chosen; None without a complete round.
        verdict: "faster", "same" or "ambiguous".
        reason: why there is no clear verdict; "" if there is one.
        margin: equivalence margin used.
        values: trial number -> rates of its reporting rounds, per second; for the baseline (0) and the finalist.
        is_likely: whether an interval of LIKELY_CONFIDENCE from all rounds, including the choosing rounds, excludes a loss;
            None if there is no such interval.
        noise: spread of one measurement, known from other rounds.
    """

    finalist: TrialRecord | None = None
    ratio: stats.Ratio | None = None
    verdict: stats.Judgement = "ambiguous"
    reason: str = ""
    margin: float = stats.MARGIN_FRAC
    values: dict[int, list[float]] = field(default_factory=dict)
    is_likely: bool | None = None
    noise: stats.Noise | None = None

    def rate(self, number: int) -> tuple[float, stats.Interval | None]:
        """Returns the mean rate of the baseline (0) or the finalist in the reporting rounds, per second, and its interval.

        Two values alone have one degree of freedom. The other trial's rounds and `noise` add more.
        """
        others = [stats.spread_of(values) for key, values in self.values.items() if key != number]
        return stats.log_mean_interval(self.values[number], noise=stats.pooled([*others, self.noise]))

    @property
    def is_slower(self) -> bool:
        """Whether the finalist was shown to be slower than the baseline."""
        return self.ratio is not None and stats.is_slower(self.ratio)

    @property
    def is_better(self) -> bool:
        """Whether the finalist is exported as the best, rather than the baseline.

        A finalist that was shown to be faster is exported. With an ambiguous verdict, it is exported if the ratio exceeds
        the margin and an interval of LIKELY_CONFIDENCE excludes a loss, or if a single round shows a large gain. The reported
        verdict is still "ambiguous". Otherwise the baseline is kept, because it needs no changes.

        Of finalists that are in truth only as fast as the baseline, at most one in ten is exported. This does little harm.
        Requiring a 95 % interval would do more harm: it rejects real gains on noisy machines and with small budgets.
        """
        if self.finalist is None or self.ratio is None or self.verdict == "same":
            return False
        if self.verdict == "faster":
            return True
        if self.is_likely is None:
            return self.ratio.ratio > 1 + max(self.margin, ONE_ROUND_FRAC)
        return self.is_likely and self.ratio.ratio > 1 + self.margin


def finalists(records: list[TrialRecord]) -> list[TrialRecord]:
    """Returns at most three search trials to measure again, best first. Trials with changes that gained nothing come last.

    Args:
        records: first measurements, the baseline first.
    """
    baseline, *searched = records
    able = [record for record in searched if record.outcome.may_win and record.score]
    distinct = {configuration_key(record.changed): record for record in able if record.changed}
    ranked = sorted(distinct.values(), key=lambda record: -(record.score or 0.0))
    fastest_first = sorted(able, key=lambda record: -(record.score or 0.0))

    @functools.cache  # compares a trial with all others, so it is called only for trials that may be chosen
    def is_worthy(place: int) -> bool:
        return not _is_superfluous(ranked[place], fastest_first)

    def down_to(least: float) -> Iterator[tuple[int, TrialRecord]]:
        return ((place, record) for place, record in enumerate(ranked) if (record.score or 0.0) >= least)

    first = next((record for place, record in enumerate(ranked) if is_worthy(place)), None)
    # A baseline that violates a constraint sets no lower limit.
    least = 0.0 if baseline.outcome is Outcome.infeasible else MIN_GAIN_FRAC * (baseline.score or 0.0)
    floor = max(CONTENDER_FRAC * (first.score or 0.0), least) if first else 0.0
    # If a configuration with only some of another's changes was as fast, the configuration with fewer changes goes first. One
    # measurement of each is no proof, so the one with more changes follows if there is room. If only the one with more changes
    # compiles, it must have shown a gain.
    near = max(floor, NEAR_FRAC * (ranked[0].score or 0.0)) if ranked else 0.0
    entrants = (record for place, record in down_to(floor) if is_worthy(place))
    wholes = (
        record for place, record in down_to(near) if not is_worthy(place) and not _compiles_without_gain(record, fastest_first)
    )
    chosen = list(itertools.islice(itertools.chain(entrants, wholes), MAX_FINALISTS))
    lower = (record for place, record in down_to(floor) if record.tier is not Tier.training and is_worthy(place))
    return _with_lower_tier(chosen, lower)


def _with_lower_tier(chosen: list[TrialRecord], lower: Iterator[TrialRecord]) -> list[TrialRecord]:
    """Returns the finalists. If all are of tier `training`, adds the best trial of a lower tier, replacing a third finalist."""
    if any(record.tier is not Tier.training for record in chosen) or (best := next(lower, None)) is None:
        return chosen
    return [*chosen[: MAX_FINALISTS - 1], best]


def _is_superfluous(record: TrialRecord, others: Iterable[TrialRecord]) -> bool:
    """Whether a trial with only some of the record's changes was as fast, judged by one measurement each."""

    def needed_frac(part: TrialRecord) -> float:
        return DEAR_GAIN_FRAC if _compiles_longer(record, part) else stats.MARGIN_FRAC

    return any((part.score or 0.0) * (1 + needed_frac(part)) >= (record.score or 0.0) for part in _parts(record, others))


def _compiles_without_gain(record: TrialRecord, others: Iterable[TrialRecord]) -> bool:
    """Whether a trial with only some of the record's changes, and without its compilation, was as fast."""
    return _is_superfluous(record, (part for part in _parts(record, others) if _compiles_longer(record, part)))


def _parts(record: TrialRecord, others: Iterable[TrialRecord]) -> Iterator[TrialRecord]:
    return (other for other in others if other.changed.items() < record.changed.items())


def _compiles_longer(record: TrialRecord, part: TrialRecord) -> bool:
    return record.phases_s.get("compile", 0.0) > DEAR_FACTOR * max(1.0, part.phases_s.get("compile", 0.0))


def choose(
    values: dict[int, list[float]],
    candidates: list[TrialRecord],
    margin: float = stats.MARGIN_FRAC,
    *,
    spread: float = 0.0,
) -> TrialRecord:
    """Returns the candidate to report: the one with the fewest changes among all candidates within the margin of the fastest.

    A candidate of tier `training` (a batch size) must beat candidates of lower tiers by more than max(margin, spread).

    Args:
        values: trial number -> rates of the choosing rounds. If only some candidates have such rates, the others are left out,
            because search values overstate the rate. If no candidate has them, search values decide.
        candidates: by search value, best first.
        margin: equivalence margin.
        spread: relative spread of one measurement from process to process.
    """
    measured = [candidate for candidate in candidates if values.get(candidate.number)]
    candidates = measured or candidates
    rates = {c.number: stats.log_mean_interval(values.get(c.number) or [c.score or 1.0])[0] for c in candidates}
    same_training = [candidate for candidate in candidates if candidate.tier is not Tier.training]
    if any(rates[candidate.number] >= max(rates.values()) / (1 + max(margin, spread)) for candidate in same_training):
        candidates = same_training
    top = max(rates[candidate.number] for candidate in candidates)
    alike = [candidate for candidate in candidates if rates[candidate.number] >= top / (1 + margin)]
    return min(alike, key=lambda candidate: (len(candidate.changed), candidate.tier.rank, -rates[candidate.number]))


def countable(records: list[TrialRecord]) -> list[TrialRecord]:
    """Returns the trials of the finals that still count, because the finalists were the same when they ran as now."""
    searched = [record for record in records if record.kind in (Kind.baseline, Kind.search)]
    now = {record.number for record in finalists(searched)}

    def is_fair(final: TrialRecord) -> bool:
        then = finalists([record for record in searched if record.number < final.number])
        return {record.number for record in then} == now

    return [record for record in records if record.kind is Kind.final and is_fair(record)]


def by_round(finals: list[TrialRecord], why: str) -> list[dict[int, TrialRecord]]:
    """Returns the rounds whose trials have this `why`, in order: dicts from a configuration's first trial to its trial here.

    If a round measured the baseline and trial 7 again, as trials 20 and 21, its dict has the keys 0 and 7.

    Args:
        finals: trials, in order of their numbers; those with another `why` are ignored.
        why: `why` of the wanted trials, such as CHOOSING or REPORTED.
    """
    rounds: dict[int, dict[int, TrialRecord]] = {}
    for final in finals:
        if final.why == why and final.outcome is not Outcome.interrupted:
            rounds.setdefault(final.round or 0, {})[final.repeats or 0] = final
    return [rounds[number] for number in sorted(rounds)]


def pairs_of(rounds: Sequence[Mapping[int, TrialRecord]], number: int) -> list[Pair]:
    """Returns the scores of a trial and of the baseline in the rounds that measured both."""
    both = [(measured[number].score, measured[0].score) for measured in rounds if {number, 0} <= measured.keys()]
    return [(own, other) for own, other in both if own is not None and other is not None]


def was_first(rounds: Sequence[Mapping[int, TrialRecord]], number: int) -> bool:
    """Whether a trial came before the baseline in the last round that measured both."""
    return next((next(iter(measured)) == number for measured in reversed(rounds) if pairs_of([measured], number)), False)


def is_lost(record: TrialRecord) -> bool:
    """Whether a trial of the finals failed or violates a constraint. A baseline that violates a constraint is not lost."""
    is_barred = bool(record.repeats) and record.outcome is Outcome.infeasible
    return is_barred or (record.score is None and not record.outcome.is_no_answer)


def failed_finalists(records: list[TrialRecord], decision: Decision) -> list[tuple[TrialRecord, TrialRecord]]:
    """Returns the configurations that looked faster than the baseline and then failed, fastest first.

    They failed when they were measured again, or when their losses were compared. The reported configuration is left out.

    Args:
        records: all trials, the baseline first.
        decision: the result of the finals.

    Returns:
        For each configuration, its first trial and its last failed trial.
    """
    reported = decision.finalist.number if decision.finalist and decision.ratio else None
    first = {record.number: record for record in records}
    failed = {r.repeats: r for r in records if r.repeats and (_fails_parity(r) or (r.kind is Kind.final and is_lost(r)))}
    faster = [
        (first[number], last)
        for number, last in failed.items()
        if number != reported and number in first and (first[number].score or 0.0) > (records[0].score or math.inf)
    ]
    return sorted(faster, key=lambda pair: -(pair[0].score or 0.0))


def _fails_parity(record: TrialRecord) -> bool:
    return record.kind is Kind.parity and record.outcome in (Outcome.parity, Outcome.nonfinite)


def without_finalist(records: list[TrialRecord]) -> Decision:
    """Returns the decision for a study in which no search trial reached the finals.

    Args:
        records: first measurements, the baseline first.
    """
    if len(records) == 1:
        return Decision(verdict="ambiguous", reason="nothing but the baseline was measured")
    if not any(record.score for record in records[1:]):
        failures = ", ".join(sorted({str(record.outcome) for record in records[1:]}))
        return Decision(verdict="ambiguous", reason=f"none of the configurations tried could be measured: {failures}")
    if any(record.outcome is Outcome.parity for record in records[1:]):
        return Decision(
            verdict="same",
            reason="no configuration that trains like the baseline came close to it; others were ruled out by their losses",
        )
    if any(_may_be_as_fast(record, records[0]) for record in records[1:]):
        reason = "undecided after one measurement each: no configuration was faster, but some may be as fast"
        return Decision(verdict="ambiguous", reason=reason)
    are_barred = records[0].outcome is not Outcome.infeasible and Outcome.infeasible in [record.outcome for record in records]
    what = "satisfies the constraints" if are_barred else "trained"
    return Decision(verdict="same", reason=f"no configuration that {what} came close to the baseline")


def _may_be_as_fast(record: TrialRecord, baseline: TrialRecord) -> bool:
    """Whether a search trial may be as fast as the baseline, though its one measurement was lower."""
    is_barred = record.outcome is Outcome.infeasible and baseline.outcome is not Outcome.infeasible
    if not record.score or record.outcome is Outcome.raced or is_barred:  # raced: stopped early, slower than the best
        return False
    highest, lowest = _end(record, 1), _end(baseline, 0)
    if highest is None or lowest is None:
        return record.score >= CONTENDER_FRAC * (baseline.score or 0.0)
    return highest >= lowest


def _end(record: TrialRecord, side: int) -> float | None:
    """Returns the lower (0) or upper (1) end of a trial's interval; None if it has no interval or its score is not the rate."""
    return record.ci[side] if record.ci is not None and record.score == record.value else None


def judge(
    chosen: TrialRecord,
    pairs: list[Pair],
    *,
    looks: int = 1,
    num_lost: int = 0,
    repeats: list[float] | None = None,
    choosing: Sequence[Mapping[int, float]] = (),
    noise: stats.Noise | None = None,
) -> Decision:
    """Returns the decision that follows from the reporting rounds.

    Args:
        chosen: the finalist.
        pairs: rates of the finalist and the baseline, one pair per round.
        looks: how often the verdict is judged while rounds are added, 1 or 2. With 2, the interval is wider.
        num_lost: rounds left out because one of the two trials failed.
        repeats: measurements of the baseline, in order, from which the margin is computed; None to use those in the pairs.
        choosing: for each choosing round, a dict from trial number to rate. These rounds help to decide what is exported, but
            do not count for the verdict. Two pairs alone would give an interval too wide for that decision: from a tenth of the
            ratio to ten times the ratio.
        noise: spread of one measurement, known from other rounds.
    """
    own, other = [a for a, _ in pairs], [b for _, b in pairs]
    ratio, margin = stats.paired_ratio(own, other, stats.LOOK_CONFIDENCE[looks], noise), stats.margin_frac(repeats or other)
    verdict = stats.verdict(ratio, margin)
    every = [*choosing, *({chosen.number: a, 0: b} for a, b in pairs)]
    beside = stats.compare_rounds(every, chosen.number, LIKELY_CONFIDENCE).ratios.get(0)
    likely = beside.ci if beside else None  # holds for all configurations jointly, so also for the chosen one
    reasons = []
    if ratio.ci is None:
        reasons.append("one round only: no interval")
    elif stats.is_slower(ratio):
        verdict, worse = "same", f"{ratio.ratio:.3f} x ({ratio.ci[0]:.3f} to {ratio.ci[1]:.3f})"
        reasons.append(f"the finalist, trial {chosen.number}, was worse when measured again: {worse}")
    elif verdict == "ambiguous":
        reasons.append(f"undecided after {len(pairs)} rounds: the interval reaches from {ratio.ci[0]:.3f} to {ratio.ci[1]:.3f}")
    if num_lost:
        rounds = "1 round of the finals does" if num_lost == 1 else f"{num_lost} rounds of the finals do"
        reasons.append(f"{rounds} not count, because a trial failed or was disturbed")
    decision = Decision(
        finalist=chosen,
        ratio=ratio,
        verdict=verdict,
        margin=margin,
        values={0: other, chosen.number: own},
        is_likely=likely[0] >= 1 if likely else None,
        noise=noise,
    )
    if verdict == "ambiguous" and decision.is_better:
        reasons.append(
            "still exported, since the 80 % interval of all rounds shows no loss" if decision.is_likely else "still exported"
        )
    decision.reason = "; ".join(reasons)
    return decision
