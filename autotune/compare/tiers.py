"""Finds the best configuration of each tier and, if there is time, measures it against the baseline."""

from __future__ import annotations

import random
from collections import Counter

from autotune import stats
from autotune.compare.decision import Decision, by_round, is_lost, judge, pairs_of, was_first
from autotune.compare.finals import MAX_LOST_ROUNDS, MIN_PAIRS
from autotune.compare.interleaving import Interleaving, Pair
from autotune.compare.noise import noise_besides, rounds_of
from autotune.records import Kind, Outcome, Tier, TrialRecord, last_round
from autotune.trials.configurations import ConfigurationKey, configuration_key
from autotune.trials.session import Session

TIERS = "finals, best of a tier"  # the `why` of a trial that measures the best of a tier


def is_barred(baseline: TrialRecord) -> bool:
    """Whether the baseline violates a constraint. If so, the best configuration without a violation wins, even a slower one."""
    return baseline.outcome is Outcome.infeasible


def leader(records: list[TrialRecord], baseline: TrialRecord, tier: Tier) -> TrialRecord:
    """Returns the best search trial of this tier or a lower one, or the baseline if no trial beat it by more than the margin.

    If the baseline violates a constraint, the best trial is returned even if it is slower. Leaves out trials whose
    configuration failed when the finals measured it again.
    """
    able = [
        r for r in records if r.kind is Kind.search and r.outcome.may_win and r.score and r.tier.rank <= tier.rank and r.changed
    ]
    out = failed_again(records)
    able = [record for record in able if configuration_key(record.changed) not in out] if out else able
    return or_baseline(max(able, key=lambda record: record.score or 0.0, default=baseline), baseline)


def or_baseline(record: TrialRecord, baseline: TrialRecord) -> TrialRecord:
    """Returns a trial, or the baseline if the trial does not beat it by more than the margin. A barred baseline never wins."""
    is_faster = (record.score or 0.0) > (baseline.score or 0.0) * (1 + stats.MARGIN_FRAC)
    return record if is_faster or is_barred(baseline) else baseline


def failed_again(records: list[TrialRecord]) -> set[ConfigurationKey]:
    """Returns the configurations that failed each time the finals measured them, or at least MAX_LOST_ROUNDS times."""
    finals = [(configuration_key(record.changed), record) for record in records if record.kind is Kind.final]
    lost = Counter(key for key, record in finals if is_lost(record))
    measured = {key for key, record in finals if record.score and not is_lost(record)}
    return {key for key, num in lost.items() if num >= MAX_LOST_ROUNDS or key not in measured}


class TierFinals:
    """Comparisons of the baseline with the best configuration of each tier below the winner's tier, as far as time allows.

    These configurations were selected by their rates in the search. The rounds measured here did not take part in the
    selection, so the reported speed-ups are not overstated.

    Attributes:
        decisions: number of the search trial -> decision from its rounds.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.decisions: dict[int, Decision] = {}

    def run(self, best: TrialRecord) -> None:
        """Measures as many tiers as there is time for, the lowest first. `best` is the study's winner."""
        session = self._session
        lower = [tier for tier in Tier if tier.rank < best.tier.rank]
        leaders = {found.number: found for tier in lower if (found := leader(session.records, session.baseline, tier)).number}
        for number, found in leaders.items():
            rounds = by_round(session.records, TIERS)  # measured by earlier runs of the study
            pairs = pairs_of(rounds, number)
            if pairs:
                self.decisions[number] = self._judged(found, pairs)
            rounds_left = MIN_PAIRS - len(pairs)
            if rounds_left > 0 and rounds_left * self._pair_s(found) <= session.budget.left_s:
                self._measure(found, pairs, rounds_left, was_one_first=was_first(rounds, number))

    def _measure(self, found: TrialRecord, pairs: list[Pair], num_rounds: int, *, was_one_first: bool) -> None:
        session = self._session
        number = last_round(session.records, Kind.final)
        rules = session.finals_rules(session.budget.left_s / (2 * num_rounds))

        def measure(first: TrialRecord) -> TrialRecord:
            return session.measure_again(first, round_number=number, rules=rules, why=TIERS)

        order = random.Random(session.inputs.config.study.seed + number)
        turns = Interleaving(found, session.baseline, measure=measure, order=order, pairs=pairs, was_one_first=was_one_first)
        for _ in range(num_rounds):
            number += 1
            if turns.round():
                self.decisions[found.number] = self._judged(found, pairs)

    def _judged(self, found: TrialRecord, pairs: list[Pair]) -> Decision:
        # The noise is estimated without the rounds of other tiers. When this tier was first judged, the tiers after it were not
        # measured yet. A resumed study has their rounds, but must reach the same decision.
        session, records = self._session, self._session.records
        own = {record.round for record in records if record.why == TIERS and record.repeats == found.number}
        rounds = rounds_of([record for record in records if record.why != TIERS or record.round in own])
        return judge(found, pairs, noise=noise_besides(pairs, rounds, session.earlier_noise))

    def _pair_s(self, found: TrialRecord) -> float:
        """Returns the expected seconds of a round, which has two trials."""
        costs = self._session.costs
        return costs.again_s(found.knobs, found.changed) + self._session.baseline.seconds
