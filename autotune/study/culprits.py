"""Finds the change that made a trial fail. Possible causes are tried right away, before more trials fail for the same cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune.records import Knobs, Outcome, TrialRecord
from autotune.search import may_be_to_blame
from autotune.search.rates import FailureModel, Proven
from autotune.space import ResolvedSpace
from autotune.study.initial import Proposal
from autotune.trials.running import CHANCE, NO_CHANCE
from autotune.wording import knob_phrase


class Culprits:
    """The failed trials of a search, with the changes that may have made them fail.

    Failures for lack of memory or by chance are left out. Each suspected change is tried on the best configuration so far,
    without the other changes of the failed trial. If the new trial fails, this change is the cause. If it works, the cause is
    among the other changes. Changes of higher tiers (precision, layout, compilation) are tried first, because they make a
    trial fail more often than changes of tier `exact`, such as loader workers.
    """

    def __init__(self, space: ResolvedSpace) -> None:
        self._space = space
        self._worked = Proven([{}])
        self._failed: list[TrialRecord] = []
        self._causes: list[Knobs] = []  # for each failed trial, the changes that may have made it fail

    def learn(self, record: TrialRecord) -> None:
        """Records a search trial."""
        if record.outcome.is_no_answer:
            return
        if record.value is not None:  # the trial worked, even if loss parity ruled it out later
            self._worked.add(record.changed)
        elif not _has_other_cause(record):
            self._failed.append(record)
            self._causes.append(may_be_to_blame(record))

    @property
    def _failure_model(self) -> FailureModel:
        return self._worked.model(len(self._causes), lambda: self._causes)

    def barring(self, changed: Knobs) -> TrialRecord | None:
        """Returns a failed trial that shows that a configuration with these changes fails; None if it may work."""
        causes = zip(self._failed, self._causes, strict=True)
        alike = next((record for record, cause in causes if cause and cause.items() <= changed.items()), None)
        if alike is not None:
            return alike
        failing = self._failure_model.failing(changed)
        same = (one for one in self._failed for key in failing if key in one.changed and one.changed[key] == changed[key])
        return next(same, None)

    def mended(self, proposal: Proposal) -> Proposal:
        """Returns the proposal with the baseline's values in place of values that are known to fail."""
        failing = self._failure_model.failing(self._space.changed(proposal.knobs))
        if not failing:
            return proposal
        kept = {key: value for key, value in proposal.knobs.items() if key not in failing}
        left_out = ", ".join(knob_phrase(key, proposal.knobs[key]) for key in failing)
        knobs = self._space.active({**self._space.reference, **kept})
        return replace(proposal, knobs=knobs, why=f"{proposal.why}, without {left_out}, with which a trial failed")

    def questions(self, best: TrialRecord) -> Iterator[tuple[str, Knobs, str]]:
        """Yields (key, full configuration, why) of trials that help to find the cause of a failure, latest failure first."""
        for record, cause in zip(reversed(self._failed), reversed(self._causes), strict=True):
            keys = self._failure_model.suspected(cause)
            others = {1: "", 2: " and one other change"}.get(len(keys), f" and {len(keys) - 1} other changes")
            for key in sorted(keys, key=lambda key: -self._space.tier({key: record.changed[key]}).rank):
                apart = {k: value for k, value in best.knobs.items() if k not in record.changed or value != record.changed[k]}
                knobs = self._space.active({**self._space.reference, **apart, key: record.changed[key]})
                if key in knobs:
                    what = knob_phrase(key, record.changed[key])
                    yield key, knobs, f"does {what} fail? trial {record.number} failed with it{others}"


def _has_other_cause(record: TrialRecord) -> bool:
    """Whether a trial may have failed for lack of memory or by chance instead of because of its changes.

    Two failed attempts in a row are not due to chance. The first attempt does not count as failed if it was only disturbed, or
    if its node was lost.
    """
    earlier = record.evidence.get("earlier_attempt", {}).get("outcome")
    has_failed_twice = earlier not in (None, Outcome.disturbed, Outcome.interrupted)
    is_certain = has_failed_twice or record.evidence.get("hang", {}).get("kind") in NO_CHANCE
    return record.outcome.is_memory or (record.outcome in CHANCE and not is_certain)
