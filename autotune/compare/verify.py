"""Verifies a best.yaml: measures its configuration and the baseline again and compares the speed-up with the file's claim."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from autotune import stats
from autotune.compare.decision import Decision, by_round, judge, pairs_of, was_first
from autotune.compare.interleaving import Interleaving
from autotune.config.claim import Claim, Verify
from autotune.config.overrides import GLOBAL_BATCH
from autotune.harness.protocol import MeasureRules
from autotune.knobs.step import ACCUMULATION
from autotune.plain_text import one_line
from autotune.quantities import seconds_text
from autotune.records import Kind, Outcome, StudyRecord, TrialRecord, last_round
from autotune.trials.session import Session

VERIFIED = "the rounds were measured"
FIRST, ROUND, LONG = "the file's configuration", "verify, in turn", "verify, long run"  # the `why` of a trial
MAX_TEXT = 100  # maximum number of characters quoted of a value from the file
MIN_ROUNDS = 2  # a single round has no spread
MAX_LOST_ROUNDS = 2  # verification gives up after this many rounds in which a configuration failed
KEPT_FRAC = 0.5  # a claim holds only if at least this share of its gain is shown again, on the log scale
PROGRAM_PARTS = ("machine.", "program.torch", "program.device_name", "program.executable")
NOTHING = "so there is nothing to compare"
NO_EFFECT = "has no effect with the program's other settings"

Verdict = Literal["holds", "no longer holds", "ambiguous"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of comparing a claim with new measurements.

    Attributes:
        verdict: whether the claim holds.
        reason: why the claim does not hold or is ambiguous; "" if it holds.
        left: today's speed-up divided by the claimed speed-up.
    """

    verdict: Verdict
    reason: str
    left: stats.Ratio


def compare(claimed: stats.Ratio, now: stats.Ratio, margin: float = stats.MARGIN_FRAC) -> Comparison:
    """Compares a claimed speed-up with today's rounds.

    Both ratios have an error. It is not enough to check whether their intervals overlap, because ratios whose intervals just
    touch already differ significantly. So the quotient gets an interval, Welch's on the log scale (`stats.quotient`). The claim

    - no longer holds if the upper end of that interval is more than the margin below 1, or if a gain was claimed but today's
      rounds show that the best is not faster than the baseline;
    - holds if neither is the case and today's rounds alone show at least half of the claimed gain. Without the last condition,
      any claim would hold if the interval was wide enough. If the baseline violates a constraint, the best configuration may be
      the slower one. Its claim then holds if today's slowdown is at most twice the claimed one (on the log scale);
    - is ambiguous otherwise.

    A true claim is rejected in less than 2.5 % of cases, since the upper end of a 95 % interval would have to miss the truth by
    more than the margin.

    Args:
        claimed: best over baseline, from the file.
        now: the same ratio from today's rounds.
        margin: equivalence margin as a fraction: this machine's A/A spread.
    """
    left = stats.quotient(now, claimed)
    if now.ci is None or left.ci is None:
        return Comparison(verdict="ambiguous", reason="one round only: no interval", left=left)
    if left.ci[1] < 1 / (1 + margin):
        kept = f"{left.ratio:.2f} [{left.ci[0]:.2f}, {left.ci[1]:.2f}]"
        reason = f"{now.ratio:.2f}x here and now, but {claimed.ratio:.2f}x is claimed: only {kept} times the claim"
        return Comparison(verdict="no longer holds", reason=reason, left=left)
    if now.ci[1] < 1 + stats.FASTER_FRAC < claimed.ratio:
        reason = f"it is not faster than the baseline any more: {now.ratio:.3f}x, at most {now.ci[1]:.3f}x"
        return Comparison(verdict="no longer holds", reason=reason, left=left)
    needed = claimed.ratio ** (KEPT_FRAC if claimed.ratio > 1 else 1 / KEPT_FRAC)
    if now.ci[0] > needed:
        return Comparison(verdict="holds", reason="", left=left)
    reason = f"undecided after {now.num_rounds} rounds: the speed-up may be anything from {now.ci[0]:.2f}x to {now.ci[1]:.2f}x"
    return Comparison(verdict="ambiguous", reason=reason, left=left)


class Verification:
    """The measurements of a verification. Rounds from earlier runs of the same verification are reused.

    The first measurement of each configuration does not count towards the result. It fills caches and shows whether the knobs
    take effect and how long a round takes.

    Attributes:
        decision: the decision so far, as in `Finals.decision`.
    """

    def __init__(self, session: Session, verify: Verify) -> None:
        self._session, self._verify = session, verify
        self._random = random.Random(session.inputs.config.study.seed)
        self._round = last_round(session.records)
        self.decision = Decision()
        self._is_overrun_reported = False

    def run(self) -> Decision:
        """Measures and returns the decision. If the user interrupts the rounds, `decision` holds the decision so far."""
        best = self._first()
        if not best.outcome.has_value:
            self.decision = Decision(reason=f"the file's configuration could not be measured: {_outcome_text(best)}")
            return self.decision
        if not best.changed:
            self.decision = Decision(reason=f"{_why_nothing(self._verify.claim, best)}, {NOTHING}")
            return self.decision
        self._session.listener.finals_started([0, best.number], None)
        self._rounds(best)
        if self._verify.long_minutes:
            self._long_runs(best, self._verify.long_minutes * 60)
        return self.decision

    def _first(self) -> TrialRecord:
        """Returns the first measurement of the file's configuration, from an earlier run if there is one."""
        session = self._session
        if (before := _first_of(session.records)) and before.outcome is not Outcome.interrupted:
            return before
        space = session.resolved
        knobs = space.active({**space.baseline, **self._verify.claim.changed})
        return session.measure(knobs, FIRST, origin="file")

    def _rounds(self, best: TrialRecord) -> None:
        session, verify = self._session, self._verify
        before = by_round(session.records, ROUND)
        pairs = pairs_of(before, best.number)
        if pairs:
            self.decision = judge(best, pairs, noise=session.earlier_noise)
        rules = session.finals_rules(verify.minutes * 60 / (2 * verify.rounds + 2))
        turns = Interleaving(
            best,
            session.baseline,
            measure=lambda r: self._again(r, rules, ROUND),
            order=self._random,
            pairs=pairs,
            was_one_first=was_first(before, best.number),
        )
        num_lost = 0
        while len(pairs) < verify.rounds and num_lost < MAX_LOST_ROUNDS:
            needed_s = (MIN_ROUNDS - len(pairs)) * self._round_s(best)
            is_late = session.budget.spent_s + max(needed_s, self._round_s(best)) > verify.minutes * 60
            if is_late and len(pairs) >= MIN_ROUNDS:
                session.listener.notice(f"{len(pairs)} of {verify.rounds} rounds fit into {verify.minutes:g} min.")
                break
            if is_late and not self._is_overrun_reported:
                self._is_overrun_reported = True
                session.listener.notice(
                    f"At least {MIN_ROUNDS} rounds always run, and they do not fit into {verify.minutes:g} min: they take "
                    f"about {seconds_text(needed_s)} from now."
                )
            self._round += 1
            if turns.round():
                self.decision = judge(best, pairs, noise=session.earlier_noise)
            else:
                num_lost += 1
        if not pairs:
            self.decision = Decision(reason=f"no round could be completed: {_failures(session.records)}")

    def _long_runs(self, best: TrialRecord, seconds: float) -> None:
        """Measures each configuration once for several minutes, to compare the rates of long runs and short windows."""
        rules = self._session.inputs.config.measure.finals
        length = {"min_s": seconds, "max_s": seconds, "slow_max_s": seconds, "half_width_frac": 0.0}
        done = {record.repeats for record in self._session.records if record.why == LONG and record.value}
        self._round += 1
        for record in (self._session.baseline, best):
            if record.number not in done:
                self._again(record, MeasureRules(**{**vars(rules), **length}), LONG)

    def _again(self, first: TrialRecord, rules: MeasureRules, why: str) -> TrialRecord:
        return self._session.measure_again(first, round_number=self._round, rules=rules, why=why)

    def _round_s(self, best: TrialRecord) -> float:
        """Returns the expected seconds of another round, taken from the last round or else from the first measurements."""
        last = [record.seconds for record in self._session.records if record.why == ROUND][-2:]
        return sum(last) or best.seconds + self._session.baseline.seconds


def verification(about: StudyRecord, records: list[TrialRecord], decision: Decision | None) -> dict[str, Any]:
    """Returns the verification as stored in a summary.

    {"file", "study", "changed": {knob: value}, "verdict": "holds|no longer holds|ambiguous" | null while it runs, "reason",
     "claimed": {"ratio", "ci", "baseline": {"value", "ci"}, "best": {"value", "ci"}}, "now": the same | null,
     "left": {"ratio", "ci"} | null (speed-up now over speed-up claimed), "differences": [phrase],
     "long": {"seconds", "baseline": {"claimed", "short", "achieved"}, "best": the same} | null}
    """
    claim, is_held = Verify.from_json(about.verifies).claim, about.identity.get(GLOBAL_BATCH) is not None
    best = _first_of(records)
    found = _found(claim, best, records, decision)
    ratio = decision.ratio if decision else None
    return {
        "file": claim.file,
        "study": claim.study,
        "changed": claim.changed,
        "verdict": found.verdict if found else None,
        "reason": found.reason if found else "",
        "claimed": {**_ratio(claim.speedup), "baseline": asdict(claim.baseline), "best": asdict(claim.best)},
        "now": _now(records, decision, ratio, best) if decision and ratio and best else None,
        "left": _ratio(found.left) if found and ratio else None,
        "differences": differences(claim, about.identity) + (_unchanged(claim, best, is_held=is_held) if best else []),
        "long": _long(claim, records, best),
    }


def differences(claim: Claim, now: dict[str, Any]) -> list[str]:
    """Returns how machine and program differ from the claim's, as phrases such as "torch: 2.14.1 there, 2.15.0 here"."""
    names = [name for name in sorted(claim.identity) if name.startswith(PROGRAM_PARTS) and now.get(name) is not None]
    return [
        f"{one_line(name.partition('.')[2], MAX_TEXT)}: {_text(claim.identity[name])} there, {_text(now[name])} here"
        for name in names
        if claim.identity[name] is not None and claim.identity[name] != now[name]
    ]


def _unchanged(claim: Claim, best: TrialRecord, *, is_held: bool) -> list[str]:
    """Returns a phrase for each of the file's changes that changes nothing here. Today's speed-up excludes them.

    Args:
        claim: the claim of the file.
        best: first measurement of the file's configuration.
        is_held: whether `train.global_batch` is set. Accumulation then follows from the batch size and is no change of its own.
    """
    counted = {*best.changed, *([ACCUMULATION.key] if is_held else [])}
    return [
        f"{key}: the program has {best.knobs[key]} already" if key in best.knobs else f"{key}: {NO_EFFECT}"
        for key in claim.changed
        if key not in counted
    ]


def _found(claim: Claim, best: TrialRecord | None, records: list[TrialRecord], decision: Decision | None) -> Comparison | None:
    """Returns the comparison with the claim; None if there is none yet."""
    nothing = stats.Ratio(ratio=math.nan, ci=None, num_rounds=0)
    if best and not best.outcome.has_value and best.outcome is not Outcome.interrupted:
        # The baseline could be measured, but not the file's configuration. So the claim does not hold here, unless the trial
        # was disturbed or cut off.
        verdict: Verdict = "ambiguous" if best.outcome.is_no_answer else "no longer holds"
        return Comparison(
            verdict=verdict, reason=f"its configuration could not be measured: {_outcome_text(best)}", left=nothing
        )
    if decision is None:
        return None
    if decision.ratio is None:
        without = [record for record in records if record.why == ROUND and record.score is None]
        lost = [record for record in without if record.outcome is not Outcome.interrupted]  # a resumed round is measured again
        failed = [one for one in lost if best and one.repeats == best.number and not one.outcome.is_no_answer]
        is_refuted = bool(lost) and failed == lost  # rounds that were lost for another reason say nothing about the claim
        return Comparison(verdict="no longer holds" if is_refuted else "ambiguous", reason=decision.reason, left=nothing)
    compared = compare(claim.speedup, decision.ratio, decision.margin)
    measured = [one for one in records if best and one.why == ROUND and one.repeats == best.number]
    if len(broken := [one for one in measured if one.violations]) >= MAX_LOST_ROUNDS:  # the finals rule it out, too
        return replace(compared, verdict="no longer holds", reason=f"it violates a constraint here: {broken[-1].reason}")
    return compared


def _why_nothing(claim: Claim, best: TrialRecord) -> str:
    """Returns why a file changes nothing here."""
    if claim.changed.keys() <= best.knobs.keys():
        return "the program already runs with all of the file's settings"
    return "none of the file's settings changes anything here"


def _first_of(records: list[TrialRecord]) -> TrialRecord | None:
    """Returns the first measurement of the file's configuration; the latest one if interrupts led to several."""
    return next((record for record in reversed(records) if record.kind is Kind.search), None)


def _rates(records: list[TrialRecord], number: int) -> list[float]:
    """Returns the rates of a configuration in the rounds, in units per second, whatever the objective is."""
    return [r.value for r in records if r.why == ROUND and r.repeats == number and r.value is not None]


def _now(records: list[TrialRecord], decision: Decision, ratio: stats.Ratio, best: TrialRecord) -> dict[str, Any]:
    sides = {}
    for name, number in (("baseline", 0), ("best", best.number)):
        value, ci = stats.log_mean_interval(_rates(records, number))
        sides[name] = {"value": value, "ci": ci}
    return {**_ratio(ratio), "num_rounds": ratio.num_rounds, "margin": decision.margin, **sides}


def _long(claim: Claim, records: list[TrialRecord], best: TrialRecord | None) -> dict[str, Any] | None:
    """Returns the rates of long runs ("achieved") and rounds ("short"); None before a long run.

    They are in units per second, whatever the objective is.
    """
    runs = {record.repeats: record for record in records if record.why == LONG and record.value is not None}
    if not runs or best is None:
        return None
    made: dict[str, Any] = {"seconds": max(record.phases_s.get("steady", 0.0) for record in runs.values())}
    for name, number, rate in (("baseline", 0, claim.baseline), ("best", best.number, claim.best)):
        again = _rates(records, number)
        made[name] = {
            "claimed": rate.value,
            "short": stats.log_mean_interval(again)[0] if again else None,
            "achieved": runs[number].value if number in runs else None,
        }
    return made


def _ratio(ratio: stats.Ratio) -> dict[str, Any]:
    return {"ratio": ratio.ratio, "ci": ratio.ci}


def _outcome_text(record: TrialRecord) -> str:
    return f"{record.outcome}: {record.reason}" if record.reason else str(record.outcome)


def _failures(records: list[TrialRecord]) -> str:
    failed = [record for record in records if record.why == ROUND and record.score is None]
    return _outcome_text(failed[-1]) if failed else "none was begun"


def _text(value: Any) -> str:
    text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
    return one_line(text, MAX_TEXT)
