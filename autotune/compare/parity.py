"""Checks loss parity: a configuration that computes differently may win only if its losses follow the baseline's.

Only changes that affect arithmetic are compared (tier `numerics`, and environment variables not known to be safe). They are
applied to the baseline, with its batch size, loader and seed, so both runs see the same batches. The comparison covers the
first steps of a fresh process; speed is not measured. So a study needs one run of the baseline and one for each set of changes
to the arithmetic, not one for each configuration. A run fits into memory whenever the baseline does. The search's best
configuration is compared at half-time, so that the second half is not spent on a configuration that cannot win. Finalists are
compared before the finals, whose rounds take far longer than a comparison.

If `train.global_batch` is set, a step with another batch size sees the same samples, so its losses are compared, too.

Comparing takes time that the finals need. So losses are compared only if the finals keep enough time for the fewest pairs that
give an interval. Without the finals, a gain is not proven, even if the losses agree.

With a change of tier `training`, such as a batch size, the program sees other batches, so its losses cannot be compared step
by step. They must stay finite and must not explode, in the search and in every trial of the finals.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from autotune import stats
from autotune.knobs.catalogue import knob
from autotune.knobs.step import tier_of
from autotune.records import Kind, Knobs, Outcome, Tier, TrialRecord
from autotune.shapes import clipped
from autotune.trials.budget import without_window_s
from autotune.trials.configurations import ConfigurationKey, configuration_key
from autotune.trials.losses import MIN_STEPS, Comparison, Verdict, compare
from autotune.trials.not_finite import loss_words
from autotune.trials.objective import UNCHECKED
from autotune.trials.session import RACED_FRAC, OutOfTime, Session
from autotune.wording import changes_phrase

MAX_S = 20.0  # longest time of the steps in one run; slow programs are compared over fewer steps
BUDGET_FRAC = 0.03  # longest time of the steps in one run, as a fraction of the study's budget
MIN_S = 5.0  # minimum time of the steps in one run, no matter how small the budget
NO_TIME = "no time was left for it: the finals need the rest"
NOT_COMPARED = "losses_not_compared"  # evidence key of a trial whose losses should have been compared; says why they were not
NO_LOSS = "no loss was seen: backward() was not called on a single number"
# A run with one of these outcomes has no losses to compare. Other outcomes, such as `disturbed`, do not affect the losses.
UNTRAINED = {
    Outcome.device_oom, Outcome.host_oom, Outcome.timeout, Outcome.crash, Outcome.error, Outcome.invalid, Outcome.interrupted,
}  # fmt: skip
SUSPECTS = ("precision.amp", "env.", "precision.matmul", "compile.mode")  # likely causes of a failure, the likeliest first


def arithmetic(changed: Knobs, *, is_held: bool = False) -> Knobs:
    """Returns the changes that may alter what a step computes from the same weights and samples.

    Args:
        changed: what a configuration changes.
        is_held: whether `train.global_batch` is set, so that a step has the same samples at any batch size.
    """
    tiers = {key: tier_of(knob(key), is_held=is_held) for key in changed}
    return {key: value for key, value in changed.items() if tiers[key] is Tier.numerics or knob(key).is_unknown}


class Parity:
    """The loss comparisons of one study. Comparisons from earlier runs of the study are reused."""

    def __init__(self, session: Session) -> None:
        self._session, self._config = session, session.inputs.config
        self._seed, self._is_held = self._config.study.seed, self._config.train.global_batch is not None
        self._settled: dict[ConfigurationKey, Comparison] = {}
        self._failed: list[TrialRecord] = []
        self._is_late = False  # whether a run did not fit into the remaining time
        for record in session.records:
            is_over = record.kind is Kind.parity and record.outcome is not Outcome.interrupted  # an interrupted run is repeated
            if is_over and record.changed and (said := record.evidence.get("parity")):
                found = Comparison(**{**said, "verdict": Verdict(said["verdict"])})
                if not found.is_unfinished:  # an unfinished comparison is completed if there is more time now
                    self._settled[configuration_key(record.changed)] = found
                if found.verdict is Verdict.failed:
                    self._rule_out(record)

    @property
    def is_possible(self) -> bool:
        """Whether losses can be compared in this study."""
        return self._config.parity.steps > 0 and bool(self._session.baseline.losses) and not loss_words(self._session.records)

    def is_open(self, candidate: TrialRecord) -> bool:
        """Whether a configuration's arithmetic changes still need a comparison, and there is time for it."""
        arithmetic_changes = configuration_key(arithmetic(candidate.changed, is_held=self._is_held))
        passed = [key for key, found in self._settled.items() if found.verdict is Verdict.passed]
        is_settled = arithmetic_changes in self._settled or any(arithmetic_changes <= key for key in passed)
        return bool(arithmetic_changes) and self.is_possible and not is_settled and self._has_time(candidate)

    def _has_time(self, candidate: TrialRecord) -> bool:
        """Whether there is time for the missing runs, besides the finals. If not, notifies the user once."""
        runs = self._references()
        each_s = max((run.seconds for run in runs), default=without_window_s(self._session.baseline) + MIN_S)
        each_s = max(each_s, without_window_s(self._session.baseline))
        is_room = (1 if runs else 2) * each_s <= self._session.budget.left_s - self._kept_s(candidate)
        has_time = is_room and not self._is_late
        if not has_time:
            self._tell_no_time(candidate)
        return has_time

    def _references(self) -> list[TrialRecord]:
        return [record for record in self._session.records if record.kind is Kind.parity and not record.changed]

    def _kept_s(self, candidate: TrialRecord) -> float:
        """Returns the seconds that the finals need at least, for the fewest pairs that give an interval."""
        session = self._session
        each_s = [min(one.fresh_s, session.costs.again_s(one.knobs, one.changed)) for one in (candidate, session.baseline)]
        return stats.MIN_PAIRS * sum(each_s)

    def _tell_no_time(self, candidate: TrialRecord) -> None:
        """Notes that a configuration was not compared for lack of time, and notifies the user once."""
        if not any(record.evidence.get(NOT_COMPARED) == NO_TIME for record in self._session.records):
            self._session.listener.notice(
                "No time to compare losses besides the finals: whether the winner trains like the baseline is not checked."
            )
        if NOT_COMPARED not in candidate.evidence:
            candidate.evidence[NOT_COMPARED] = NO_TIME
            self._session.folder.write_trial(candidate)

    def barring(self, changed: Knobs) -> TrialRecord | None:
        """Returns the failed run that rules out these changes; None if there is none."""
        return next((run for run in self._failed if run.changed.items() <= changed.items()), None)

    def check(self, candidate: TrialRecord) -> None:
        """Compares a configuration with the baseline, if there is time; a failure rules out its changes."""
        try:
            self._check(candidate)
        except OutOfTime:
            self._is_late = True
            self._tell_no_time(candidate)

    def _check(self, candidate: TrialRecord) -> None:
        arithmetic_changes = arithmetic(candidate.changed, is_held=self._is_held)
        record = self._compared(arithmetic_changes, candidate)
        if self._of(record).verdict is not Verdict.failed:
            return
        first = min(arithmetic_changes, key=_cause_rank)
        if len(arithmetic_changes) > 1:  # finds the cause, so that configurations without it may still win
            with contextlib.suppress(OutOfTime):  # if time runs out, all of the changes are ruled out together
                alone = self._compared({first: arithmetic_changes[first]}, candidate)
                record = alone if self._of(alone).verdict is Verdict.failed else record
        numbers = self._rule_out(record)
        barred = f"trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        self._session.listener.notice(
            f"Loss parity: {changes_phrase(record.changed)} fails ({self._of(record).reason}). Ruled out with it: {barred}."
        )
        self._session.after_trial()

    def _of(self, record: TrialRecord) -> Comparison:
        return self._settled[configuration_key(record.changed)]

    def _compared(self, changed: Knobs, candidate: TrialRecord) -> TrialRecord:
        """Returns the run of the baseline with these changes, which holds the result of the comparison."""
        reference = self._run({}, candidate, self._seed)
        if configuration_key(changed) in self._settled:
            return self._run(changed, candidate, self._seed)
        record = self._run(changed, candidate, self._seed) if _is_usable(reference) else reference
        found = self._comparison(record, reference)
        if found.may_be_chance:
            found = self._compared_with_chance(found, record, reference, candidate)
        self._settled[configuration_key(changed)] = found
        if record is reference:  # the baseline's own run failed, so there is nothing to compare with
            return dataclasses.replace(reference, changed=changed)
        record.evidence["parity"] = dataclasses.asdict(found)
        if found.difference_frac is not None:
            record.metrics["loss_difference_frac"] = clipped(found.difference_frac)
        if found.verdict is Verdict.failed and record.outcome is not Outcome.nonfinite:
            record.outcome = Outcome.parity
        if record.outcome not in UNTRAINED:
            record.reason = found.reason
        self._session.folder.write_trial(record)
        return record

    def _compared_with_chance(
        self, found: Comparison, record: TrialRecord, reference: TrialRecord, candidate: TrialRecord
    ) -> Comparison:
        """Repeats a failed comparison. Another run of the baseline shows how large a difference may be by chance.

        If that run cannot be made or has no usable losses, the comparison is inconclusive.
        """
        try:
            other = self._run({}, candidate, (self._seed + 1) % 2**32)
        except OutOfTime:
            why = "no time was left to see whether two runs of the baseline differ as much"
        else:
            if not (lacks := _why_unusable(other)):
                return self._comparison(record, reference, other)
            why = f"whether two runs of the baseline differ as much is not known, because the second one {lacks}"
        return dataclasses.replace(found, verdict=Verdict.unknown, reason=f"{found.reason}; {why}")

    def _comparison(self, record: TrialRecord, reference: TrialRecord, other: TrialRecord | None = None) -> Comparison:
        if record.outcome in (Outcome.nonfinite, Outcome.parity):
            return Comparison(verdict=Verdict.failed, reason=record.reason)
        if record.outcome in UNTRAINED:
            who = "the baseline's run" if record is reference else "its run"
            return Comparison(verdict=Verdict.unknown, reason=f"{who} ended as {record.outcome}: {record.reason}")
        if not record.losses:
            return Comparison(verdict=Verdict.unknown, reason=no_losses(record))
        tolerance_frac, chance = self._config.parity.tolerance, other.losses if other else ()
        return compare(record.losses, reference.losses, tolerance_frac=tolerance_frac, chance=chance)

    def _run(self, changed: Knobs, candidate: TrialRecord, seed: int) -> TrialRecord:
        """Returns a run of the baseline's first steps with these changes and a seed; reuses an earlier run if there is one."""
        session = self._session
        for record in session.records:
            is_same = record.kind is Kind.parity and record.changed == changed and record.evidence.get("seed") == seed
            if is_same and record.outcome is not Outcome.interrupted:
                return record
        return session.first_steps(
            changed,
            candidate,
            why=f"loss parity of {changes_phrase(changed)}" if changed else "loss parity: the baseline's losses",
            seed=seed,
            max_steps=self._config.parity.steps,
            max_s=self._most_s(candidate),
            kept_s=self._kept_s(candidate),
        )

    def _most_s(self, candidate: TrialRecord) -> float:
        """Returns the most seconds that the steps of a run may take, so that all missing runs leave time for the finals."""
        budget = self._session.budget
        if budget.total_s is None:
            return MAX_S
        each_s = (budget.left_s - self._kept_s(candidate)) / (1 if self._references() else 2)
        spare_s = each_s - without_window_s(self._session.baseline)
        return max(MIN_S, min(MAX_S, BUDGET_FRAC * budget.total_s, spare_s))

    def _rule_out(self, failed: TrialRecord) -> list[int]:
        """Rules out the search trials that contain the changes of a failed run; returns their numbers."""
        self._failed.append(failed)
        barred = [r for r in self._session.searched if r.outcome.has_value and failed.changed.items() <= r.changed.items()]
        for record in barred:
            record.outcome = Outcome.parity  # the measured value is kept
            record.evidence["barred_for"] = sorted(failed.changed)
            record.reason = f"{changes_phrase(failed.changed)}: {failed.reason} (trial {failed.number})"
            self._session.folder.write_trial(record)
        self._readmit_raced()
        self._session.recount()
        return [record.number for record in barred]

    def _readmit_raced(self) -> None:
        """Readmits trials that were stopped early for being slower than a trial that is now ruled out."""
        searched = self._session.searched
        best = max((r.score for r in searched if r.outcome.may_win and r.score), default=0.0)
        for record in searched:
            if record.outcome is Outcome.raced and (record.score or 0.0) >= RACED_FRAC * best:
                if record.violations or UNCHECKED in record.reason:
                    record.outcome = Outcome.infeasible
                else:
                    record.outcome, record.reason = Outcome.ok, "stopped early: slower than a trial that was ruled out later"
                self._session.folder.write_trial(record)


def no_losses(record: TrialRecord) -> str:
    """Returns the reason why a trial has no losses to compare."""
    return str(record.evidence.get("why_no_losses") or NO_LOSS)


def report(best: TrialRecord | None, records: list[TrialRecord], *, is_held: bool = False) -> dict[str, Any] | None:
    """Returns the loss comparisons of `best`, for `summary["parity"]`; None without `best`. `is_held` as in `arithmetic`."""
    if best is None:
        return None
    runs = [record for record in records if record.kind is Kind.parity and record.changed and record.evidence.get("parity")]
    out = [run for run in runs if run.evidence["parity"]["verdict"] == Verdict.failed]
    failed = [
        {"knobs": run.changed, "reason": run.evidence["parity"]["reason"], "trial": run.number}
        for run in out
        if not any(other.changed.items() < run.changed.items() for other in out)  # only the smallest sets of changes that fail
    ]
    arithmetic_changes = arithmetic(best.changed, is_held=is_held)
    tiers = {key: tier_of(knob(key), is_held=is_held) for key in best.changed}
    training = {key: value for key, value in best.changed.items() if tiers[key] is Tier.training}
    found: dict[str, Any] = {"verdict": "not needed", "reason": "it computes what the baseline computes", "trial": None}
    if arithmetic_changes:
        passed = [run for run in runs if run.evidence["parity"]["verdict"] == Verdict.passed]
        run = next((run for run in passed if arithmetic_changes.items() <= run.changed.items()), None)
        run = run or next((run for run in runs if run.changed == arithmetic_changes), None)
        why = (
            no_losses(records[0]) if not records[0].losses else loss_words(records) or _why_not_yet(arithmetic_changes, records)
        )
        found = {"verdict": str(Verdict.unknown), "reason": why, "trial": None}
        if run is not None:
            found = {**run.evidence["parity"], "trial": run.number}
        elif reference := next((r for r in records if r.kind is Kind.parity and not r.changed and not _is_usable(r)), None):
            found["reason"] = f"the baseline's run ended as {reference.outcome}: {reference.reason or no_losses(reference)}"
    found |= {"knobs": arithmetic_changes, "training": training, "failed": failed}
    return {**found, "text": _text(found)}


def _why_not_yet(changed: Knobs, records: list[TrialRecord]) -> str:
    """Returns why changes were not compared, as noted in the evidence of a trial that contains them."""
    able = (record.evidence.get(NOT_COMPARED) for record in records if changed.items() <= record.changed.items())
    return next(filter(None, able), "it was not compared yet")


def _text(found: dict[str, Any]) -> str:
    text = found["reason"]
    if found["verdict"] == Verdict.unknown:
        text = f"not checked: {text}"
    elif found["verdict"] == "not needed" and found["training"]:
        text = ""
    if found["training"]:
        words = f"{changes_phrase(found['training'])} changes the training itself, so only an exploding loss would rule it out"
        text = f"{text}; {words}" if text else words
    return str(text)


def _is_usable(reference: TrialRecord) -> bool:
    return reference.outcome not in UNTRAINED and bool(reference.losses)


def _why_unusable(other: TrialRecord) -> str:
    """Returns why a run of the baseline cannot show how much losses differ by chance: "made only 3 steps"; "" if it can."""
    if not _is_usable(other):
        return f"ended as {other.outcome}: {other.reason or no_losses(other)}"
    if None in other.losses:
        return "had a loss that is not finite"
    return f"made only {len(other.losses)} steps" if len(other.losses) < MIN_STEPS else ""


def _cause_rank(key: str) -> int:
    return next((place for place, prefix in enumerate(SUSPECTS) if key.startswith(prefix)), len(SUSPECTS))
