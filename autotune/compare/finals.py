"""Runs the finals: measures the best few configurations and the baseline again, interleaved, in fresh processes.

Two mistakes would overstate the gain. The first is to pick the best of many noisy numbers and to report those same numbers. So
the first rounds choose, and only later rounds are reported. The second is to stop as soon as the rounds look good. So the
verdict is judged only once, or twice if there is time. How often it is judged is decided before the rounds are seen,
and judging twice widens the interval. tests/stats/test_finals_hold.py measures the remaining error.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections import Counter
from collections.abc import Callable

from autotune import stats
from autotune.compare.ablation import MAX_LOSS_FRAC, SCREENING_ROUNDS, Kept
from autotune.compare.decision import (
    CONTENDER_FRAC,
    Decision,
    by_round,
    choose,
    countable,
    finalists,
    is_lost,
    judge,
    pairs_of,
    was_first,
    without_finalist,
)
from autotune.compare.interleaving import Interleaving, Pair
from autotune.compare.noise import assumed_noise, comparable_since, known_noise, noise_besides, rounds_of
from autotune.compare.parity import Parity
from autotune.records import CHOOSING, REPORTED, Kind, Outcome, TrialRecord, last_round
from autotune.trials.configurations import ConfigurationKey, attribution_of, configuration_key
from autotune.trials.session import OutOfTime, Session

MIN_PAIRS = 3
LOOKS = (8, 16)  # rounds after which the verdict is judged: the second time only if it was ambiguous the first time
MAX_LOST_ROUNDS = 2  # after this many failures in the finals a configuration is excluded
WANTED_TRIALS = 14  # measurements are so short that this many trials fit: five pairs and a choosing round of four
CHOOSING_ROUNDS = 2  # the second round runs only configurations within reach of the leader
# Two single measurements differ clearly if they are this many spreads apart: two standard deviations of their difference.
SINGLE_SPREADS = 2 * math.sqrt(2)
SLACK_PAIRS = 0.5  # the ablation leaves time for this many spare pairs, in case a pair takes longer than expected
LARGE_EFFECT = 1.15  # above this ratio to the baseline, confirming the best is worth more than further search trials
KNOWN_TO_FRAC = 0.5  # the ablation leaves time for enough reporting pairs to know the gain to ± this share of it (log scale)
WELL_KNOWN_TO_FRAC = 0.25  # replaces KNOWN_TO_FRAC while the ablation only makes vague effects more precise
MAX_KEPT_FRAC = 0.5  # maximum time kept for reporting pairs, as a share of the time left


class Finals:
    """The finals of one study. Rounds of earlier runs of the study count if the finalists are still the same.

    Args:
        session: the study.
        ablate: reverts changes of the chosen configuration to measure their effects, and returns the trial to report. It leaves
            the seconds of `Kept` unused.
        known_part: returns the trial that `ablate` would return from what is known so far, without measuring.
    """

    def __init__(
        self,
        session: Session,
        ablate: Callable[[TrialRecord, Kept], TrialRecord] = lambda chosen, _: chosen,
        known_part: Callable[[TrialRecord], TrialRecord] = lambda chosen: chosen,
    ) -> None:
        self._session, self._ablate, self._known_part = session, ablate, known_part
        self._parity = Parity(session)
        finals = [record for record in session.records if record.kind is Kind.final]
        self._earlier = countable(session.records)
        self._round = last_round(finals)
        self._random = random.Random(session.inputs.config.study.seed + self._round)
        self._rules = session.inputs.config.measure.finals
        self._lost: Counter[ConfigurationKey] = Counter()  # rounds of the finals in which a configuration failed
        for record in self._earlier:
            self._note_loss(record)
        unfair = [record for record in finals if record not in self._earlier]
        self._unfair = {record.number for record in unfair}
        if unfair:
            session.listener.notice(
                f"The earlier finals (trials {unfair[0].number} to {unfair[-1].number}) do not count: the search has "
                "found other finalists since."
            )
        self.decision = Decision()

    def run(self) -> Decision:
        """Measures and returns the decision. If the user ends the finals early, `decision` holds the decision so far."""
        session = self._session
        candidates = self._remaining_finalists()
        if not candidates:
            return self._none_left()
        # This uses the time left, so it must follow `_remaining_finalists`, which takes time to compare losses.
        self._rules = session.finals_rules((session.budget.left_s - session.budget.attribution_s) / WANTED_TRIALS)
        left_s = None if session.budget.total_s is None else max(0.0, session.budget.left_s)
        session.listener.finals_started([0, *(c.number for c in candidates)], left_s)
        while candidates:
            chosen = self._chosen_before(candidates) or self._chosen(candidates)
            if self._is_out(chosen):  # every candidate failed in each choosing round
                self._earlier = []
            if self._is_out(chosen) or self._fails_parity(chosen):
                candidates = self._remaining_finalists()
                continue
            part = self._minimal(chosen)
            if part.number == 0:  # all changes were dropped, so there is nothing to compare
                reason = f"no single change of the fastest configuration, trial {chosen.number}, had a clear effect"
                self.decision = Decision(verdict="same", reason=reason)
                return self.decision
            if self._report(part):
                return self.decision
            self._earlier = []
            candidates = self._remaining_finalists()
        return self._none_left()

    def _none_left(self) -> Decision:
        failed = Decision(reason="every finalist failed when it was measured again")
        self.decision = failed if self._has_failed else without_finalist(self._session.searched)
        return self.decision

    @property
    def _has_failed(self) -> bool:
        """Whether any configuration has failed too often in the finals."""
        return any(key and num >= MAX_LOST_ROUNDS for key, num in self._lost.items())

    def _remaining_finalists(self) -> list[TrialRecord]:
        """Returns the finalists that loss parity has not ruled out.

        Once a configuration has failed too often in the finals, all configurations that ever failed there are left out. One of
        them may stay: the configuration that an earlier run of the study chose last, unless it failed too often itself.

        Only the leader's losses are compared now. The losses of another finalist are compared when it is chosen, since a
        comparison may take as long as a pair of the finals.
        """
        searched = self._session.searched
        if self._has_failed:
            searched = [one for one in searched if not one.number or not self._num_lost(one) or self._is_reported(one)]
        candidates = finalists(searched)
        while candidates and self._fails_parity(candidates[0]):
            candidates = finalists(searched)
        return candidates

    def _fails_parity(self, candidate: TrialRecord) -> bool:
        """Compares a configuration's losses with the baseline's, unless that was done; returns whether it is ruled out."""
        if self._parity.is_open(candidate):
            self._parity.check(candidate)
        return not candidate.outcome.may_win

    def _chosen_before(self, candidates: list[TrialRecord]) -> TrialRecord | None:
        """Returns the candidate for which an earlier run of the study measured reporting rounds; None if there is none."""
        # Sorted: the candidate of the latest ablation, then candidates that would be reported without some of their changes.
        ablations = [record.origin for record in self._session.records if record.kind is Kind.attribution]
        by_part = sorted(candidates, key=lambda c: (attribution_of(c) not in ablations[-1:], self._known_part(c) is c))
        return next((c for c in by_part if self._usable_part(self._known_part(c), c).number == self._last_reported), None)

    @property
    def _last_reported(self) -> int | None:
        """The number of the finalist in the last reporting round of earlier runs of the study; None if there is none."""
        rounds = by_round(self._earlier, REPORTED)
        return next((number for measured in reversed(rounds) for number in measured if number), None)

    def _is_reported(self, candidate: TrialRecord) -> bool:
        """Whether an earlier run of the study chose this candidate last, and it has not failed too often since."""
        part = self._usable_part(self._known_part(candidate), candidate)
        return part.number == self._last_reported and not self._is_out(candidate) and not self._is_out(part)

    def _minimal(self, chosen: TrialRecord) -> TrialRecord:
        """Returns the configuration to report: the chosen one without its ineffective changes."""
        self.decision = Decision(finalist=chosen, reason="it has not been measured again against the baseline")
        return self._usable_part(self._ablate(chosen, self._kept(chosen)), chosen)

    def _usable_part(self, part: TrialRecord, chosen: TrialRecord) -> TrialRecord:
        """Returns `part` (some of the changes of `chosen`), or `chosen` if `part` failed too often or violates a constraint."""
        return chosen if self._is_out(part) or part.outcome is Outcome.infeasible else part

    def _is_out(self, record: TrialRecord) -> bool:
        """Whether a configuration has failed too often in the finals."""
        return self._num_lost(record) >= MAX_LOST_ROUNDS

    def _num_lost(self, record: TrialRecord) -> int:
        return self._lost[configuration_key(record.changed)]

    def _kept(self, chosen: TrialRecord) -> Kept:
        """Returns the time that the ablation must leave for reporting pairs, so that these can prove the gain."""
        budget, noise, pair_s = self._session.budget, self._noise(chosen), self._pair_s(chosen)
        gain = math.log(max(1.0, (chosen.score or 0.0) / (self._session.baseline.score or math.inf)))
        fracs = (KNOWN_TO_FRAC, WELL_KNOWN_TO_FRAC)
        enough, plenty = (stats.pairs_to_tell(frac * gain, noise, at_most=LOOKS[0]) for frac in fracs)
        affordable = int(MAX_KEPT_FRAC * budget.left_s / pair_s) if budget.total_s is not None else enough
        least = max(stats.MIN_PAIRS, min(enough, affordable))
        least_s, rounds_s, enough_s = (
            (num + SLACK_PAIRS) * pair_s for num in (least, max(MIN_PAIRS, least), max(MIN_PAIRS, plenty))
        )
        return Kept(least_s=least_s, rounds_s=rounds_s, enough_s=enough_s)

    def _noise(self, *candidates: TrialRecord) -> stats.Noise:
        """Returns the spread of one measurement; an assumption until a configuration has been measured twice."""
        known = known_noise(self._session.records, self._session.earlier_noise)
        return known or assumed_noise([self._session.baseline, *candidates])

    def _chosen(self, candidates: list[TrialRecord]) -> TrialRecord:
        """Runs at most two choosing rounds, as long as they leave time for the reporting pairs; returns the winner."""
        # A round that was cut off is not completed later, because all trials of a round must be measured side by side.
        rounds = list(filter(_is_comparison, by_round(self._earlier, CHOOSING)))
        candidates = [c for c in candidates if self._can_be_confirmed(c)] or candidates
        entrants, since = list(candidates), comparable_since(self._session.records)
        for index in range(CHOOSING_ROUNDS):
            if index < len(rounds):
                continue  # measured by an earlier run of the study
            entrants = self._affordable(_within_reach(entrants, rounds[:index], since))
            if len(entrants) < 2 or not self._has_time_for_effects(entrants, is_first=not index):
                break
            self._round += 1
            rounds.append({})
            order = self._with_baseline(entrants)
            self._random.shuffle(order)
            with contextlib.suppress(OutOfTime):
                for entrant in order:
                    rounds[index][entrant.number] = self._measure(entrant, CHOOSING)
        rounds = list(filter(_is_comparison, rounds))
        rates, measured = _mean_rates(candidates, rounds, since), _measured_in(rounds)
        competing = _competing(candidates, measured)  # only these may win, if there are any
        able = [c for c in candidates if not self._num_lost(c)] or [c for c in candidates if not self._is_out(c)] or candidates
        noise = self._noise(*candidates)
        spread = noise.spread * (1.0 if all(c.number in measured for c in competing or candidates) else SINGLE_SPREADS)
        margin = min(max(stats.MARGIN_FRAC, spread), MAX_LOSS_FRAC)
        found = choose({c.number: [rates[c.number]] for c in competing}, able, margin, spread=spread)
        if len(able) > 1 and not measured and found.number != able[0].number:
            names = " and ".join(str(one.number) for one in able)
            self._session.listener.notice(
                f"No time to measure trials {names} side by side. Trial {found.number} was chosen: it changes less, and the "
                "search shows no clear difference in rate."
            )
        return found

    def _affordable(self, entrants: list[TrialRecord]) -> list[TrialRecord]:
        """Returns the best entrants: as many as a round can measure and still leave enough time for the reporting pairs."""
        spare_s = self._session.budget.left_s - MIN_PAIRS * max(map(self._pair_s, entrants))
        paid: list[TrialRecord] = []
        for entrant in entrants:
            spare_s -= self._expected_s(entrant)
            if spare_s >= 0:
                paid.append(entrant)
        return paid

    def _has_time_for_effects(self, entrants: list[TrialRecord], *, is_first: bool) -> bool:
        """Whether a choosing round leaves time to measure the effects of changes, which matter more than the round.

        After the first round, there must be time to revert each change once. After the second, there must be time to revert it
        SCREENING_ROUNDS times.
        """
        each_s = max(map(self._expected_s, entrants))
        round_s = sum(map(self._expected_s, entrants)) + self._expected_s(self._session.baseline)
        num_changes = max(len(entrant.changed) for entrant in entrants)
        effects_s = (num_changes if is_first else SCREENING_ROUNDS * (1 + num_changes)) * each_s
        kept_s = MIN_PAIRS * max(map(self._pair_s, entrants))
        return round_s + effects_s + kept_s <= self._session.budget.left_s

    def _with_baseline(self, entrants: list[TrialRecord]) -> list[TrialRecord]:
        baseline = self._session.baseline
        needed_s = sum(map(self._expected_s, [*entrants, baseline])) + MIN_PAIRS * max(map(self._pair_s, entrants))
        return [*entrants, baseline] if needed_s <= self._session.budget.left_s else entrants

    def _report(self, chosen: TrialRecord) -> bool:
        """Runs the reporting pairs up to the last look needed; returns False if another configuration must be chosen."""
        pairs, num_lost = self._pairs_before(chosen)
        looks = self._looks(chosen, len(pairs))
        self.decision = Decision(finalist=chosen, reason="no time was left to measure it again against the baseline")
        if pairs:
            self.decision = self._judged(chosen, pairs, looks=looks, num_lost=num_lost)
        measure = functools.partial(self._measure, why=REPORTED)
        was_first_before = was_first(by_round(self._earlier, REPORTED), chosen.number)
        turns = Interleaving(
            chosen, self._session.baseline, measure=measure, order=self._random, pairs=pairs, was_one_first=was_first_before
        )
        for _ in range(len(pairs) + num_lost, LOOKS[looks - 1] + MAX_LOST_ROUNDS):
            is_settled = len(pairs) in LOOKS[:looks] and self.decision.verdict != "ambiguous"
            if is_settled or len(pairs) >= LOOKS[looks - 1] or not self._has_time_for_pair(chosen, len(pairs)):
                break
            self._round += 1
            try:
                num_lost += turns.round() is None
            except OutOfTime:
                break
            if pairs:  # an interim decision, in case the user ends the study now; the rounds continue
                self.decision = self._judged(chosen, pairs, looks=looks, num_lost=num_lost)
            if self._is_out(chosen):
                return False
        # Without time for another pair, it is pointless to choose another configuration.
        if pairs or not self._num_lost(chosen) or not self._has_time_for_pair(chosen, len(pairs)):
            return True
        # No round measured both the chosen configuration and the baseline, so that configuration must not be chosen again.
        self._lost[configuration_key(chosen.changed)] = MAX_LOST_ROUNDS
        return False

    def _looks(self, chosen: TrialRecord, num_pairs: int) -> int:
        """Returns how often the verdict will be judged, given the time left. This is decided before the rounds are seen."""
        affordable = num_pairs + self._session.budget.left_s / max(self._pair_s(chosen), 1e-9)
        return 2 if num_pairs > LOOKS[0] or affordable >= LOOKS[0] + MIN_PAIRS else 1

    def _judged(self, chosen: TrialRecord, pairs: list[Pair], *, looks: int, num_lost: int) -> Decision:
        # Rounds that are measured after the verdict are left out, so that a resumed study judges as it did before them.
        own = [one for one in self._session.records if one.kind is not Kind.final or one.why in (CHOOSING, REPORTED)]
        records = [record for record in own if record.kind is Kind.final]
        repeats = [record.score for record in records if record.repeats == 0 and record.score]  # choosing rounds count, too
        fair = [record for record in records if record.number not in self._unfair]
        choosing = [_rates_of(measured) for measured in by_round(fair, CHOOSING)]
        noise = noise_besides(pairs, rounds_of(own), self._session.earlier_noise)
        decision = judge(chosen, pairs, looks=looks, num_lost=num_lost, repeats=repeats, choosing=choosing, noise=noise)
        is_kept = decision.verdict == "ambiguous" and not decision.is_better
        if is_kept and self._session.baseline.outcome is not Outcome.infeasible:  # an infeasible baseline is not kept
            decision.reason += "; the baseline is kept, since it needs no changes"
        return decision

    def _pairs_before(self, chosen: TrialRecord) -> tuple[list[Pair], int]:
        """Returns what an earlier run of the study measured: pairs of finalist and baseline, and the number of lost rounds.

        A round that was cut off half-way does not count, because both configurations must be measured right after each other.
        """
        rounds = by_round(self._earlier, REPORTED)
        pairs = pairs_of(rounds, chosen.number)
        others = (place for place, measured in enumerate(rounds, 1) if measured.keys() - {chosen.number, 0})
        own = rounds[max(others, default=0) :]  # includes lost rounds that measured only the baseline
        return pairs, sum(any(one.score is None for one in measured.values()) for measured in own)

    def _can_be_confirmed(self, candidate: TrialRecord) -> bool:
        """Whether enough pairs fit. A configuration that takes a minute to compile may take too long to confirm."""
        return stats.MIN_PAIRS * self._pair_s(candidate) <= self._session.budget.left_s

    def _has_time_for_pair(self, chosen: TrialRecord, num_pairs: int) -> bool:
        """Whether another pair fits. The first MIN_PAIRS may use the time kept for `explain`, which can be run later."""
        budget, pair_s = self._session.budget, self._pair_s(chosen)
        return budget.take_from_passes(pair_s) if num_pairs < MIN_PAIRS else pair_s <= budget.left_s

    def _measure(self, first: TrialRecord, why: str) -> TrialRecord:
        record = self._session.measure_again(first, round_number=self._round, rules=self._rules, why=why)
        self._note_loss(record)
        return record

    def _note_loss(self, record: TrialRecord) -> None:
        self._lost[configuration_key(record.changed)] += is_lost(record)

    def _pair_s(self, entrant: TrialRecord) -> float:
        return self._expected_s(entrant) + self._expected_s(self._session.baseline)

    def _expected_s(self, first: TrialRecord) -> float:
        """Returns the expected seconds of measuring a configuration again, from its finals trials or else from the search.

        What the search had to compile is in the study's compile cache now. A disturbed trial takes longer than usual, so it
        counts only if there is no other trial.
        """
        finals = [record for record in self._session.records if record.kind is Kind.final]
        again = [record for record in finals if record.repeats == first.number]
        taken = [record.attempt_s for record in again if record.outcome is not Outcome.disturbed]
        taken = taken or [record.attempt_s for record in again]
        return max(taken) if taken else min(first.fresh_s, self._session.costs.again_s(first.knobs, first.changed))


def _mean_rates(candidates: list[TrialRecord], rounds: list[dict[int, TrialRecord]], since: int) -> dict[int, float]:
    """Returns {trial number: mean rate over the choosing rounds}; {} before the first round.

    The search's measurements count as a round. They overstate the rates, the best rate most of all. But on a noisy machine, two
    rounds alone say little. In replays with known true rates, counting the search makes the choice 0.3 to 0.6 %
    better. On one recorded table, it raised the share of studies that reached 95 % of the optimum from 98 to 100 %. On another
    table, it lowered that share from 76 to 70 %; there the best two configurations differ by less than repeats of the same
    configuration.

    Search rates of trials before number `since` are not comparable with those of later ones. They count only if there is a
    candidate without any other rate.
    """
    is_complete = _measured_in(rounds) >= {candidate.number for candidate in candidates}
    searched = {one.number: one for one in candidates if one.number >= since or not is_complete}
    return stats.round_means([_rates_of(found) for found in [searched, *rounds]]) if any(rounds) else {}


def _is_comparison(measured: dict[int, TrialRecord]) -> bool:
    """Whether a choosing round compares at least two candidates. A round that was cut off may have fewer."""
    return sum(bool(number) and record.outcome is not Outcome.interrupted for number, record in measured.items()) > 1


def _competing(candidates: list[TrialRecord], measured: set[int]) -> list[TrialRecord]:
    """Returns the candidates among which the choosing rounds decide: the best down to the last one that was measured.

    A round measures the best candidates, as many as there is time for, in random order. If one of them has no rate although
    a worse one has, the round was cut off before its turn, or its trial was disturbed. It then competes with its search rate.
    """
    places = [place for place, candidate in enumerate(candidates, 1) if candidate.number in measured]
    return candidates[: max(places, default=0)]


def _within_reach(entrants: list[TrialRecord], rounds: list[dict[int, TrialRecord]], since: int) -> list[TrialRecord]:
    """Returns the entrants that may still turn out to be the fastest after some choosing rounds."""
    rates = _mean_rates(entrants, rounds, since)
    own = {entrant.number: rates.get(entrant.number, 0.0) for entrant in entrants}  # the baseline's rate does not count
    return [entrant for entrant in entrants if own[entrant.number] >= CONTENDER_FRAC * max(own.values())]


def _measured_in(rounds: list[dict[int, TrialRecord]]) -> set[int]:
    return {number for found in rounds for number in _rates_of(found)}


def _rates_of(measured: dict[int, TrialRecord]) -> dict[int, float]:
    return {number: record.score for number, record in measured.items() if record.score}
