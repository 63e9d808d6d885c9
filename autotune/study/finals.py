"""The finals: the best few and the baseline measured again, in fresh processes, taking turns.

Who picks the best of many noisy numbers and quotes the same numbers overstates. So the first rounds choose one, and only later
rounds, which had no part in the choice, are reported.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from autotune import stats
from autotune.harness.protocol import MeasureRules
from autotune.records import Kind, Outcome, TrialRecord
from autotune.study.budget import finals_rules
from autotune.study.session import Session, configuration_key
from autotune.study.turns import Pair, Turns

MAX_FINALISTS = 3
CONTENDER_FRAC = 0.85  # of the best value: below that, noise alone does not explain the difference
MIN_GAIN_FRAC = 0.97  # of the baseline's value: a finalist must at least come near it
MIN_PAIRS, MAX_PAIRS = 3, 8
DEAR_FACTOR = 5.0  # times the other's compile phase: the difference is a compilation
DEAR_GAIN_FRAC = 0.03  # what a compilation must gain in the search to be worth its cost in every round of the finals
MAX_LOST_ROUNDS = 2  # after so many failures in the finals a configuration is out
WANTED_TRIALS = 14  # the reserved time is shared by so many: five pairs, a choosing round of four
CHOOSING_ROUNDS = 2
CHOOSING, REPORTED = "finals, choosing", "finals, reported"  # why a final is run: what it counts for


@dataclass(kw_only=True)
class Decision:
    """What the finals found.

    Attributes:
        finalist: search trial that was chosen and reported; None when no configuration came near the baseline.
        ratio: finalist over baseline, from the reporting rounds; None without a complete round.
        verdict: "faster", "same" or "ambiguous".
        reason: why the verdict is not plain, "" when it is.
        margin: equivalence margin used.
        values: trial number -> rates of its reporting rounds, per second, the baseline (0) and the finalist.
    """

    finalist: TrialRecord | None = None
    ratio: stats.Ratio | None = None
    verdict: stats.Judgement = "ambiguous"
    reason: str = ""
    margin: float = stats.MARGIN_FRAC
    values: dict[int, list[float]] = field(default_factory=dict)

    @property
    def is_slower(self) -> bool:
        """Whether the finalist was shown to be slower than the baseline."""
        return self.ratio is not None and self.ratio.ci is not None and self.ratio.ci[1] < 1

    @property
    def is_better(self) -> bool:
        """Whether the finalist is handed over as the best, rather than the baseline.

        Shown faster; or ambiguous on the right side: faster by more than the margin, and not shown to be able to be slower.
        Everything else goes to the configuration with fewer changes, which is the baseline.
        """
        if self.finalist is None or self.ratio is None:
            return False
        if self.verdict == "faster":
            return True
        is_likely = self.ratio.ratio > 1 + self.margin
        return self.verdict == "ambiguous" and is_likely and (self.ratio.ci is None or self.ratio.ci[0] >= 1 - self.margin)


def finalists(records: list[TrialRecord]) -> list[TrialRecord]:
    """Returns the search trials worth measuring again, best first, three at most.

    Args:
        records: first measurements, the baseline first.
    """
    baseline, *searched = records
    able = [record for record in searched if record.outcome.may_win and record.score]
    distinct = {configuration_key(record.changed): record for record in able if record.changed}
    worthy = [record for record in distinct.values() if not _is_superfluous(record, able)]
    ranked = sorted(worthy, key=lambda record: -(record.score or 0.0))
    floor = max(CONTENDER_FRAC * (ranked[0].score or 0.0), MIN_GAIN_FRAC * (baseline.score or 0.0)) if ranked else 0.0
    return [record for record in ranked if (record.score or 0.0) >= floor][:MAX_FINALISTS]


def _is_superfluous(record: TrialRecord, others: list[TrialRecord]) -> bool:
    """Returns whether a part of the record's changes alone is as fast, within what one measurement each can tell."""

    def needed(other: TrialRecord) -> float:
        is_dear = record.phases_s.get("compile", 0.0) > DEAR_FACTOR * max(1.0, other.phases_s.get("compile", 0.0))
        return 1 + (DEAR_GAIN_FRAC if is_dear else stats.MARGIN_FRAC)

    return any(
        other.changed.items() < record.changed.items() and (other.score or 0.0) * needed(other) >= (record.score or 0.0)
        for other in others
    )


def choose(values: dict[int, list[float]], candidates: list[TrialRecord], margin: float = stats.MARGIN_FRAC) -> TrialRecord:
    """Returns the candidate to report: the fastest, or among those within the margin of it the one with fewest changes.

    Args:
        values: trial number -> rates of the choosing rounds; a candidate without any counts with its search value.
        candidates: best first by the search.
        margin: equivalence margin.
    """
    rates = {c.number: stats.log_mean_interval(values.get(c.number) or [c.score or 1.0])[0] for c in candidates}
    top = max(rates.values())
    alike = [candidate for candidate in candidates if rates[candidate.number] >= top / (1 + margin)]
    return min(alike, key=lambda candidate: (len(candidate.changed), candidate.tier.rank, -rates[candidate.number]))


def that_count(records: list[TrialRecord]) -> list[TrialRecord]:
    """Returns the finals measured so far that still count: the search has found no other finalists since.

    Args:
        records: all trials, by number.
    """
    searched = [record for record in records if record.kind is not Kind.final]
    now = {record.number for record in finalists(searched)}

    def is_fair(final: TrialRecord) -> bool:
        then = finalists([record for record in searched if record.number < final.number])
        return {record.number for record in then} == now

    return [record for record in records if record.kind is Kind.final and is_fair(record)]


def by_round(finals: list[TrialRecord], why: str) -> list[dict[int, TrialRecord]]:
    """Returns the rounds of one kind, in order, each as number of the trial measured again -> its final; cut off ones left out.

    Args:
        finals: by number.
        why: CHOOSING or REPORTED.
    """
    rounds: dict[int, dict[int, TrialRecord]] = {}
    for final in finals:
        if final.why == why and final.outcome is not Outcome.interrupted:
            rounds.setdefault(final.round or 0, {})[final.repeats or 0] = final
    return [rounds[number] for number in sorted(rounds)]


class Finals:
    """Runs the finals of one study; what earlier runs of it have measured counts, as far as it is fair."""

    def __init__(self, session: Session) -> None:
        self._session = session
        finals = [record for record in session.records if record.kind is Kind.final]
        self._earlier = that_count(session.records)
        self._round = max((record.round or 0 for record in finals), default=0)
        self._random = random.Random(session.plan.config.study.seed + self._round)
        self._rules = self._affordable_rules()
        self._lost: dict[int, int] = {}  # trial number -> rounds of the finals in which it failed
        for record in self._earlier:
            self._note_loss(record)
        if unfair := [record for record in finals if record not in self._earlier]:
            session.listener.notice(
                f"The finals measured before (trials {unfair[0].number} to {unfair[-1].number}) do not count: the search has "
                "found other finalists since."
            )
        self.decision = Decision()

    def run(self) -> Decision:
        """Returns the decision; `decision` holds what there is of it when the user ends the finals early."""
        session = self._session
        candidates = self._left_in()
        if not candidates:
            self.decision = _without_finalist(session.searched)
            return self.decision
        session.listener.finals_started([0, *(c.number for c in candidates)], self._left_s_or_none())
        while candidates:
            chosen = self._chosen_before(candidates) or self._chosen(candidates)
            if self._report(chosen):
                return self.decision
            self._earlier = []
            candidates = self._left_in()
        self.decision = Decision(reason="every finalist failed when it was measured again")
        return self.decision

    def _left_in(self) -> list[TrialRecord]:
        """Returns the finalists; once one is out, among the configurations that have not failed in the finals."""
        searched = self._session.searched
        if max((count for number, count in self._lost.items() if number), default=0) >= MAX_LOST_ROUNDS:
            searched = [record for record in searched if record.number == 0 or not self._lost.get(record.number)]
        return finalists(searched)

    def _chosen_before(self, candidates: list[TrialRecord]) -> TrialRecord | None:
        """Returns the candidate that an earlier run of the study has begun to report."""
        reported = [number for paired in by_round(self._earlier, REPORTED) for number in paired if number]
        return next((c for c in candidates if reported and c.number == reported[-1]), None)

    def _affordable_rules(self) -> MeasureRules:
        rules = self._session.plan.config.measure.finals
        if self._session.budget.total_s is None:
            return rules
        return finals_rules(rules, seconds_each=self._session.budget.left_s / WANTED_TRIALS, baseline=self._session.baseline)

    def _chosen(self, candidates: list[TrialRecord]) -> TrialRecord:
        """Runs choosing rounds while they leave time for the pairs that report, two at most; returns the winner."""
        rounds = by_round(self._earlier, CHOOSING)
        candidates = [c for c in candidates if self._can_be_confirmed(c)] or candidates
        entrants = list(candidates)
        for index in range(CHOOSING_ROUNDS):
            if index < len(rounds) - 1:
                continue  # an earlier run of the study went on to the next
            entrants = self._that_can_be_paid(entrants)
            if len(entrants) < 2:
                break
            if index == len(rounds):
                self._round += 1
                rounds.append({})
            order = [entrant for entrant in self._with_baseline(entrants) if entrant.number not in rounds[index]]
            self._random.shuffle(order)
            for entrant in order:
                rounds[index][entrant.number] = self._measure(entrant, CHOOSING)
        values: dict[int, list[float]] = {}
        for measured in rounds:
            for number, record in measured.items():
                values.setdefault(number, []).extend([record.score] if record.score is not None else [])
        able = [c for c in candidates if not self._lost.get(c.number)] or candidates
        return choose(values, able)

    def _that_can_be_paid(self, entrants: list[TrialRecord]) -> list[TrialRecord]:
        """Returns the first so many entrants that a round can hold without taking time from the reporting pairs."""
        spare_s = self._session.budget.left_s - MIN_PAIRS * max(map(self._pair_s, entrants))
        paid: list[TrialRecord] = []
        for entrant in entrants:
            spare_s -= self._expected_s(entrant)
            if spare_s >= 0:
                paid.append(entrant)
        return paid

    def _with_baseline(self, entrants: list[TrialRecord]) -> list[TrialRecord]:
        baseline = self._session.baseline
        needed_s = sum(map(self._expected_s, [*entrants, baseline])) + MIN_PAIRS * max(map(self._pair_s, entrants))
        return [*entrants, baseline] if needed_s <= self._session.budget.left_s else entrants

    def _report(self, chosen: TrialRecord) -> bool:
        """Runs reporting pairs and judges after each; returns whether `chosen` held out."""
        baseline = self._session.baseline
        pairs = self._pairs_before(chosen)
        self.decision = Decision(finalist=chosen, reason="no time was left to measure it again beside the baseline")
        if pairs:
            self.decision = judge(chosen, pairs)
        turns = Turns(chosen, baseline, measure=self._measure_reported, order=self._random, pairs=pairs)
        for _ in range(len(pairs), MAX_PAIRS + MAX_LOST_ROUNDS):
            if len(pairs) == MAX_PAIRS or not self._has_time_for_pair(chosen, len(pairs)):
                break
            self._round += 1
            if turns.round():
                self.decision = judge(chosen, pairs)
            if self._lost.get(chosen.number, 0) >= MAX_LOST_ROUNDS:
                return False
        return bool(pairs) or not self._lost.get(chosen.number)

    def _pairs_before(self, chosen: TrialRecord) -> list[Pair]:
        """Returns the rates of the rounds that an earlier run of the study has reported, of the finalist and the baseline.

        A round that was cut off half-way does not count: the two are to be measured right after each other.
        """
        pairs = []
        for measured in by_round(self._earlier, REPORTED):
            own, other = (measured[number].score if number in measured else None for number in (chosen.number, 0))
            if own is not None and other is not None:
                pairs.append((own, other))
        return pairs

    def _can_be_confirmed(self, candidate: TrialRecord) -> bool:
        """Whether enough pairs of it fit: a configuration that takes a minute to compile may be too dear to prove."""
        budget = self._session.budget
        return stats.MIN_PAIRS * self._pair_s(candidate) <= budget.left_s + budget.overtime_s

    def _has_time_for_pair(self, chosen: TrialRecord, num_pairs: int) -> bool:
        budget = self._session.budget
        overtime_s = budget.overtime_s if num_pairs < MIN_PAIRS else 0.0
        return self._pair_s(chosen) <= budget.left_s + overtime_s

    def _measure_reported(self, first: TrialRecord) -> TrialRecord:
        return self._measure(first, REPORTED)

    def _measure(self, first: TrialRecord, why: str) -> TrialRecord:
        record = self._session.measure_again(first, round_number=self._round, rules=self._rules, why=why)
        self._note_loss(record)
        return record

    def _note_loss(self, record: TrialRecord) -> None:
        if record.score is None and not record.outcome.is_no_answer:
            number = record.repeats or 0
            self._lost[number] = self._lost.get(number, 0) + 1

    def _pair_s(self, entrant: TrialRecord) -> float:
        return self._expected_s(entrant) + self._expected_s(self._session.baseline)

    def _expected_s(self, first: TrialRecord) -> float:
        """Returns what measuring a configuration again will cost: as it did in the finals, else as in the search.

        What was compiled in the search comes from the study's compile cache now.
        """
        again = [record.attempt_s for record in self._session.records if record.repeats == first.number]
        return max(again) if again else min(first.attempt_s, self._session.costs.again_s(first.knobs, first.changed))

    def _left_s_or_none(self) -> float | None:
        return None if self._session.budget.total_s is None else max(0.0, self._session.budget.left_s)


def _slower(chosen: TrialRecord, ratio: stats.Ratio) -> str:
    assert ratio.ci is not None
    interval = f"{ratio.ci[0]:.3f} to {ratio.ci[1]:.3f}"
    return f"the finalist, trial {chosen.number}, was slower when measured again: {ratio.ratio:.3f} x ({interval})"


def _without_finalist(records: list[TrialRecord]) -> Decision:
    if len(records) == 1:
        return Decision(verdict="ambiguous", reason="nothing but the baseline was measured")
    if not any(record.score for record in records[1:]):
        failures = ", ".join(sorted({str(record.outcome) for record in records[1:]}))
        return Decision(verdict="ambiguous", reason=f"none of the configurations tried could be measured: {failures}")
    return Decision(verdict="same", reason="no configuration that trained came near the baseline")


def judge(chosen: TrialRecord, pairs: list[Pair]) -> Decision:
    """Returns what the reporting rounds say.

    Args:
        chosen: the finalist.
        pairs: its rate and the baseline's, per round.
    """
    own, other = [a for a, _ in pairs], [b for _, b in pairs]
    ratio, margin = stats.paired_ratio(own, other), stats.margin_frac(other)
    verdict = stats.verdict(ratio, margin)
    reason = ""
    if ratio.ci is None:
        reason = "one round only: no interval"
    elif ratio.ci[1] < 1:
        verdict, reason = "same", _slower(chosen, ratio)
    elif verdict == "ambiguous":
        reason = f"{len(pairs)} rounds do not tell; the interval reaches from {ratio.ci[0]:.3f} to {ratio.ci[1]:.3f}"
    return Decision(
        finalist=chosen, ratio=ratio, verdict=verdict, reason=reason, margin=margin, values={0: other, chosen.number: own}
    )
