"""The finals: the best few and the baseline measured again, in fresh processes, taking turns.

Who picks the best of many noisy numbers and quotes the same numbers overstates. So the first rounds choose one, and only later
rounds, which had no part in the choice, are reported. Who looks at the rounds again and again and stops when they please him
claims too much as well: the verdict is looked at once, or twice where time allows, which is settled before the first look and
paid for with a wider interval. tests/stats/test_finals_hold.py measures what is left of either mistake.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune import stats
from autotune.harness.protocol import MeasureRules
from autotune.records import Kind, Outcome, TrialRecord
from autotune.study.budget import finals_rules
from autotune.study.parity import Parity
from autotune.study.session import Session, configuration_key
from autotune.study.turns import Pair, Turns

MAX_FINALISTS = 3
CONTENDER_FRAC = 0.85  # of the best value: below that, noise alone does not explain the difference
MIN_GAIN_FRAC = 0.97  # of the baseline's value: a finalist must at least come near it
MIN_PAIRS = 3
LOOKS = (8, 16)  # rounds after which the verdict is looked at; what is ambiguous then goes on to the next
DEAR_FACTOR = 5.0  # times the other's compile phase: the difference is a compilation
DEAR_GAIN_FRAC = 0.03  # what a compilation must gain in the search to be worth its cost in every round of the finals
MAX_LOST_ROUNDS = 2  # after so many failures in the finals a configuration is out
WANTED_TRIALS = 14  # the reserved time is shared by so many: five pairs, a choosing round of four
CHOOSING_ROUNDS = 2
ONE_ROUND_FRAC = 0.15  # what a single round must gain to be handed over: three times what two noisy runs, 3.5 % each, differ by
KEPT_PAIRS = 4  # so many reporting pairs are left time for when the chosen configuration is taken apart
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
        num_lost: reporting rounds that are left out because one of the two failed in them.
        values: trial number -> rates of its reporting rounds, per second, the baseline (0) and the finalist.
    """

    finalist: TrialRecord | None = None
    ratio: stats.Ratio | None = None
    verdict: stats.Judgement = "ambiguous"
    reason: str = ""
    margin: float = stats.MARGIN_FRAC
    num_lost: int = 0
    values: dict[int, list[float]] = field(default_factory=dict)

    @property
    def is_slower(self) -> bool:
        """Whether the finalist was shown to be slower than the baseline."""
        return self.ratio is not None and stats.is_slower(self.ratio)

    @property
    def is_better(self) -> bool:
        """Whether the finalist is handed over as the best, rather than the baseline.

        Shown faster; or ambiguous on the right side: by more than the margin, with an interval that holds no loss, or by a
        lot where there was time for one round only. Everything else goes to the configuration with fewer changes, which is
        the baseline.
        """
        if self.finalist is None or self.ratio is None or self.verdict == "same":
            return False
        if self.ratio.ci is None:
            return self.ratio.ratio > 1 + max(self.margin, ONE_ROUND_FRAC)
        return self.verdict == "faster" or (self.ratio.ci[0] >= 1 and self.ratio.ratio > 1 + self.margin)


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
    # A baseline that breaks a constraint is no measure of what may win.
    least = 0.0 if baseline.outcome is Outcome.infeasible else MIN_GAIN_FRAC * (baseline.score or 0.0)
    floor = max(CONTENDER_FRAC * (ranked[0].score or 0.0), least) if ranked else 0.0
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
        values: trial number -> rates of the choosing rounds. Who has none is not chosen before one that has: its search
            value, which brought it here, overstates. Without any rounds all count with their search values.
        candidates: best first by the search.
        margin: equivalence margin.
    """
    measured = [candidate for candidate in candidates if values.get(candidate.number)]
    candidates = measured or candidates
    rates = {c.number: stats.log_mean_interval(values.get(c.number) or [c.score or 1.0])[0] for c in candidates}
    top = max(rates.values())
    alike = [candidate for candidate in candidates if rates[candidate.number] >= top / (1 + margin)]
    return min(alike, key=lambda candidate: (len(candidate.changed), candidate.tier.rank, -rates[candidate.number]))


def that_count(records: list[TrialRecord]) -> list[TrialRecord]:
    """Returns the finals measured so far that still count: the search has found no other finalists since.

    Args:
        records: all trials, by number.
    """
    searched = [record for record in records if record.kind in (Kind.baseline, Kind.search)]
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
    """Runs the finals of one study; what earlier runs of it have measured counts, as far as it is fair.

    Args:
        session: the study.
        apart: takes the chosen configuration apart, leaving so many seconds, and returns the part of it that is to be reported.
        known_part: returns that part as far as it is known, without measuring.
    """

    def __init__(
        self,
        session: Session,
        apart: Callable[[TrialRecord, float], TrialRecord] = lambda chosen, _: chosen,
        known_part: Callable[[TrialRecord], TrialRecord] = lambda chosen: chosen,
    ) -> None:
        self._session, self._apart, self._known_part = session, apart, known_part
        self._parity = Parity(session)
        finals = [record for record in session.records if record.kind is Kind.final]
        self._earlier = that_count(session.records)
        self._round = max((record.round or 0 for record in finals), default=0)
        self._random = random.Random(session.plan.config.study.seed + self._round)
        self._rules = session.plan.config.measure.finals
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
        self._rules = self._affordable_rules()  # of the time that comparing losses has left
        session.listener.finals_started([0, *(c.number for c in candidates)], self._left_s_or_none())
        while candidates:
            chosen = self._chosen_before(candidates) or self._chosen(candidates)
            if self._report(self._minimal(chosen)):
                return self.decision
            self._earlier = []
            candidates = self._left_in()
        self.decision = Decision(reason="every finalist failed when it was measured again")
        return self.decision

    def _left_in(self) -> list[TrialRecord]:
        """Returns the finalists, their losses compared; once one is out, of the configurations that have not failed."""
        searched = self._session.searched
        if max((count for number, count in self._lost.items() if number), default=0) >= MAX_LOST_ROUNDS:
            searched = [record for record in searched if record.number == 0 or not self._lost.get(record.number)]
        candidates = finalists(searched)
        while suspects := [candidate for candidate in candidates if self._parity.is_open(candidate)]:
            self._parity.check(suspects[0])
            candidates = finalists(searched)
        return candidates

    def _chosen_before(self, candidates: list[TrialRecord]) -> TrialRecord | None:
        """Returns the candidate that an earlier run of the study has begun to report."""
        reported = [number for paired in by_round(self._earlier, REPORTED) for number in paired if number]
        by_part = sorted(candidates, key=lambda candidate: self._known_part(candidate) is candidate)  # those taken apart first
        return next((c for c in by_part if reported and self._known_part(c).number == reported[-1]), None)

    def _minimal(self, chosen: TrialRecord) -> TrialRecord:
        """Returns what is reported of the chosen configuration: all of it, or without the changes that buy nothing."""
        self.decision = Decision(finalist=chosen, reason="it has not been measured again beside the baseline")
        part = self._apart(chosen, KEPT_PAIRS * self._pair_s(chosen))
        return chosen if self._lost.get(part.number, 0) >= MAX_LOST_ROUNDS else part

    def _affordable_rules(self) -> MeasureRules:
        rules = self._session.plan.config.measure.finals
        if self._session.budget.total_s is None:
            return rules
        budget = self._session.budget
        seconds_each = (budget.left_s - budget.attribution_s) / WANTED_TRIALS
        return finals_rules(rules, seconds_each=seconds_each, baseline=self._session.baseline)

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
        rates = stats.round_means([{n: r.score for n, r in measured.items() if r.score} for measured in rounds])
        able = [c for c in candidates if not self._lost.get(c.number)] or candidates
        return choose({number: [rate] for number, rate in rates.items()}, able)

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
        """Runs reporting pairs up to the last look that is needed; returns whether `chosen` held out."""
        pairs, num_lost = self._pairs_before(chosen)
        looks = self._looks(chosen, len(pairs))
        self.decision = Decision(finalist=chosen, reason="no time was left to measure it again beside the baseline")
        if pairs:
            self.decision = self._judged(chosen, pairs, looks=looks, num_lost=num_lost)
        turns = Turns(chosen, self._session.baseline, measure=self._measure_reported, order=self._random, pairs=pairs)
        for _ in range(len(pairs), LOOKS[looks - 1] + MAX_LOST_ROUNDS):
            is_settled = len(pairs) in LOOKS[:looks] and self.decision.verdict != "ambiguous"
            if is_settled or len(pairs) >= LOOKS[looks - 1] or not self._has_time_for_pair(chosen, len(pairs)):
                break
            self._round += 1
            num_lost += turns.round() is None
            if pairs:  # for whoever ends the study now; the rounds go on whatever it says
                self.decision = self._judged(chosen, pairs, looks=looks, num_lost=num_lost)
            if self._lost.get(chosen.number, 0) >= MAX_LOST_ROUNDS:
                return False
        return bool(pairs) or not self._lost.get(chosen.number)

    def _looks(self, chosen: TrialRecord, num_pairs: int) -> int:
        """Returns how often the verdict will be looked at, by the time there is: settled before the rounds are seen."""
        affordable = num_pairs + self._session.budget.left_s / max(self._pair_s(chosen), 1e-9)
        return 2 if num_pairs > LOOKS[0] or affordable >= LOOKS[0] + MIN_PAIRS else 1

    def _judged(self, chosen: TrialRecord, pairs: list[Pair], *, looks: int, num_lost: int) -> Decision:
        finals = [record for record in self._session.records if record.kind is Kind.final and record.repeats == 0]
        repeats = [record.score for record in finals if record.score]  # of the choosing rounds too
        decision = judge(chosen, pairs, looks=looks, num_lost=num_lost, repeats=repeats)
        if decision.verdict == "ambiguous" and not decision.is_better:
            decision.reason += "; the baseline is kept, it needs no changes"
        return decision

    def _pairs_before(self, chosen: TrialRecord) -> tuple[list[Pair], int]:
        """Returns what an earlier run of the study has reported: rates of finalist and baseline by round, and rounds lost.

        A round that was cut off half-way does not count: the two are to be measured right after each other.
        """
        both = {chosen.number, 0}
        rounds = [measured for measured in by_round(self._earlier, REPORTED) if both <= set(measured)]
        scores = [(measured[chosen.number].score, measured[0].score) for measured in rounds]
        pairs = [(own, other) for own, other in scores if own is not None and other is not None]
        return pairs, len(rounds) - len(pairs)

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
        number = record.repeats or 0
        is_barred = bool(number) and record.outcome is Outcome.infeasible
        if is_barred or (record.score is None and not record.outcome.is_no_answer):
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
    return f"the finalist, trial {chosen.number}, was worse when measured again: {ratio.ratio:.3f} x ({interval})"


def _without_finalist(records: list[TrialRecord]) -> Decision:
    if len(records) == 1:
        return Decision(verdict="ambiguous", reason="nothing but the baseline was measured")
    if not any(record.score for record in records[1:]):
        failures = ", ".join(sorted({str(record.outcome) for record in records[1:]}))
        return Decision(verdict="ambiguous", reason=f"none of the configurations tried could be measured: {failures}")
    if any(record.outcome is Outcome.parity for record in records[1:]):
        return Decision(verdict="same", reason="what was faster does not train as the baseline does: see its losses")
    return Decision(verdict="same", reason="no configuration that trained came near the baseline")


def judge(
    chosen: TrialRecord, pairs: list[Pair], *, looks: int = 1, num_lost: int = 0, repeats: list[float] | None = None
) -> Decision:
    """Returns what the reporting rounds say.

    Args:
        chosen: the finalist.
        pairs: its rate and the baseline's, per round.
        looks: how often the rounds are judged while they grow; the interval holds at all of them together.
        num_lost: rounds left out because one of the two failed.
        repeats: more measurements of the baseline, in order, for the machine's own spread; None takes those of the pairs.
    """
    own, other = [a for a, _ in pairs], [b for _, b in pairs]
    ratio, margin = stats.paired_ratio(own, other, stats.LOOK_CONFIDENCE[looks]), stats.margin_frac(repeats or other)
    verdict = stats.verdict(ratio, margin)
    reasons = []
    if ratio.ci is None:
        reasons.append("one round only: no interval")
    elif stats.is_slower(ratio):
        verdict = "same"
        reasons.append(_slower(chosen, ratio))
    elif verdict == "ambiguous":
        reasons.append(f"{len(pairs)} rounds do not tell; the interval reaches from {ratio.ci[0]:.3f} to {ratio.ci[1]:.3f}")
    if num_lost:
        reasons.append(f"{num_lost} more round{'s' if num_lost > 1 else ''}, in which one of the two failed, left out")
    return Decision(
        finalist=chosen,
        ratio=ratio,
        verdict=verdict,
        reason="; ".join(reasons),
        margin=margin,
        num_lost=num_lost,
        values={0: other, chosen.number: own},
    )
