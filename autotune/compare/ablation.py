"""Computes the effect of each change of a winner from ablation rounds. It measures nothing itself.

A "part" is the winner without one of its changes, or without all the changes that seem to have no effect. A round measures the
winner and some of its parts, once each, in fresh processes and in random order. Each part is compared with the winner in the
same round, so that drift of the machine does not affect the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from autotune import stats
from autotune.compare.decision import LIKELY_CONFIDENCE
from autotune.compare.noise import UNKNOWN_NOISE
from autotune.records import Knobs, KnobValue, Outcome, Tier, TrialRecord
from autotune.space import ResolvedSpace
from autotune.trials.configurations import ConfigurationKey, configuration_key

Worth = Literal["faster", "same", "slower", "ambiguous", "needed", "not measured"]
Basis = Literal["measured", "estimated", ""]
MEASURED: tuple[Worth, ...] = ("faster", "same", "slower", "ambiguous")

SCREENING_ROUNDS = 2  # rounds in which each change is reverted on its own; a single round shows no spread
MAX_ROUNDS = 16  # after this many rounds, intervals shrink too slowly to justify the time
DECIDED_AFTER = 8  # after this many rounds of a part and the winner, the point estimate decides instead of the interval
SUSPECT_MARGINS = 2.0  # changes without a proven effect are reverted together if each gains at most this many margins
ESTIMATED_FRAC = 0.03  # a change with a smaller estimated gain can be left out, because single measurements differ by as much
NARROW_FRAC = 0.25  # an effect is known well enough once its interval's half-width is at most this share of its gain
# Dropping changes may cost at most this share of the rate. The measured ratio decides, not its interval. Noise does not raise
# the limit, which was chosen in replays of 50 studies for each recorded table. A limit of 0.05 wrongly dropped a change that
# gained 17 % (mlp) or 9 % (resnet18) in 11 studies, a limit of 0.02 in three. With the lower limit, more changes without effect
# stay. In simulations at 5 % noise, 200 winners each had one change that gains 30 % and three without an effect. One of the
# three stayed in 16 % of the studies with 0.02, and in 2 % with 0.05.
MAX_LOSS_FRAC = 0.02
MOST_LOST_FRAC = 0.08  # a change may be left out only if its gain's LIKELY_CONFIDENCE interval ends below this
# A change of tier `training`, such as another batch size, is exported only if it gains more than this and more than the
# machine's spread.
TRAINING_GAIN_FRAC = 0.03
MOST_LOST_TRAINING_FRAC = 0.3  # replaces MOST_LOST_FRAC for changes of tier `training`: they are left out more readily
FAR = 3.0  # single trials must differ by this many standard errors to overrule an estimate
FEW_ROUNDS = 4  # an ambiguous effect from fewer rounds is replaced by the knob's estimate if that is more precise
MAX_FAILURES = 2  # after this many failures, a part counts as impossible to measure and its knob as "needed"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Seconds that the ablation must leave in the budget for the finals' reporting rounds. More important trials leave less.

    Attributes:
        least_s: seconds to leave during single trials outside rounds: trials for missing estimates, and the trial of the winner
            without its ineffective changes.
        rounds_s: seconds to leave during the ablation rounds.
        enough_s: seconds to leave during further trials that only make effects more precise.
    """

    least_s: float = 0.0
    rounds_s: float = 0.0
    enough_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A winner without some of its changes.

    Attributes:
        keys: knobs that are reverted to the baseline's values.
        also: changes that are lost as well because they depend on the reverted knobs, as prefetch_factor does on workers.
        knobs: the resulting full configuration.
        key: identity of the configuration.
    """

    keys: frozenset[str]
    also: tuple[str, ...]
    knobs: Knobs
    key: ConfigurationKey


def part_of(space: ResolvedSpace, winner: TrialRecord, keys: Iterable[str]) -> Part:
    """Returns the winner without the changes of some knobs."""
    put_back = frozenset(keys)
    kept = {key: value for key, value in winner.changed.items() if key not in put_back}
    knobs = space.active({**space.reference, **kept})
    changed = space.changed(knobs)
    also = tuple(sorted(key for key in kept if key not in changed))
    return Part(keys=put_back, also=also, knobs=knobs, key=configuration_key(changed))


@dataclass(frozen=True, kw_only=True)
class Change:
    """The effect of one change of a winner.

    Attributes:
        knob: key of the changed knob.
        before, after: the baseline's value and the winner's.
        also: knobs that depend on this knob, so that their changes are lost without it.
        ratio: the winner's rate over its rate without the change; None if unknown.
        worth: "faster", "same", "slower" (the winner is faster without the change), "ambiguous", "needed" (without the change
            nothing can be measured) or "not measured" (and not estimated).
        basis: "measured" in rounds with the winner, "estimated" from the study's trials, or "" if neither.
        is_kept: whether the change is part of the configuration that is exported.
        reason: why there is no ratio, such as "no time"; "" if there is one.
    """

    knob: str
    before: KnobValue | None
    after: KnobValue
    also: tuple[str, ...]
    ratio: stats.Ratio | None
    worth: Worth
    is_kept: bool
    basis: Basis = ""
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the change as stored in the summary."""
        return {
            "knob": self.knob,
            "from": self.before,
            "to": self.after,
            "with": list(self.also),
            "ratio": self.ratio.ratio if self.ratio else None,
            "ci": self.ratio.ci if self.ratio else None,
            "verdict": self.worth,
            "basis": self.basis,
            "reason": self.reason,
            "num_rounds": self.ratio.num_rounds if self.ratio else 0,
        }


class AblationResults:
    """The effects of a winner's changes, as far as the ablation rounds show them.

    Args:
        space: the search space.
        winner: the trial whose changes are reverted one by one.
        trials: attribution trials of this winner, by number.
        estimates: knob -> its effect estimated from all trials; see `effects.estimated`.
        noise: spread of one measurement, from rounds other than those of `trials`.
        measured: configuration -> its scores in all trials.
        together: knobs without estimates of their own -> their joint effect, estimated from all trials.
        assumed: spread of one measurement, used until rounds show it.
    """

    def __init__(
        self,
        space: ResolvedSpace,
        winner: TrialRecord,
        trials: Sequence[TrialRecord],
        estimates: Mapping[str, stats.Ratio] | None = None,
        noise: stats.Noise | None = None,
        measured: Mapping[ConfigurationKey, Sequence[float]] | None = None,
        together: Mapping[frozenset[str], stats.Ratio] | None = None,
        assumed: stats.Noise = UNKNOWN_NOISE,
    ) -> None:
        self._space, self._winner, self._estimates, self._known = space, winner, estimates or {}, measured or {}
        self._joint = together or {}
        self.parts = {key: part_of(space, winner, [key]) for key in winner.changed}
        self._failed: dict[ConfigurationKey, list[TrialRecord]] = {}
        rounds: dict[int, dict[ConfigurationKey, float]] = {}
        for trial in trials:
            key = configuration_key(trial.changed)
            if trial.score is not None and trial.outcome is not Outcome.infeasible:
                rounds.setdefault(trial.round or 0, {})[key] = trial.score
            elif not trial.outcome.is_no_answer:
                self._failed.setdefault(key, []).append(trial)
        self.num_rounds = sum(len(measured) > 1 for measured in rounds.values())  # a round of one trial compares nothing
        found = stats.compare_rounds(list(rounds.values()), configuration_key(winner.changed), noise=noise)
        known = stats.pooled([found.noise, noise])
        self._ratios, self._spread = found.ratios, (known or assumed).spread
        self.margin = max(stats.MARGIN_FRAC, known.spread if known else 0.0)  # no less than the machine's own spread
        self._training_frac = max(TRAINING_GAIN_FRAC, self._spread)
        self.loss_frac = min(self.margin, MAX_LOSS_FRAC)

    def ratio(self, part: Part) -> stats.Ratio | None:
        """Returns the ratio of the winner to a part; None if no round measured both."""
        return self._ratios.get(part.key)

    def num_rounds_of(self, part: Part) -> int:
        """Returns how many rounds measured both the winner and the part."""
        ratio = self.ratio(part)
        return ratio.num_rounds if ratio else 0

    def failure(self, part: Part) -> TrialRecord | None:
        """Returns the failure that makes a part count as impossible to measure; None while another attempt is worthwhile."""
        failed = self._failed.get(part.key, [])
        is_sure = any(trial.outcome.is_memory or trial.outcome is Outcome.infeasible for trial in failed)
        is_out = len(failed) >= MAX_FAILURES or is_sure
        return failed[-1] if is_out else None

    def parts_as_fast(self, *, num_rounds: int) -> list[Part]:
        """Returns the parts that revert one change, are as fast as the winner to within `loss_frac`, and still lack rounds.

        A part lacks rounds if fewer than `num_rounds` rounds measured both it and the winner.
        """
        found = []
        for part in self.parts.values():
            ratio = self.ratio(part)
            if ratio and ratio.num_rounds < num_rounds and ratio.ratio <= 1 + self.loss_frac and not self.failure(part):
                found.append(part)
        return found

    def worth(self, knob: str) -> Worth:
        """Returns the verdict of the rounds on one knob."""
        part = self.parts[knob]
        ratio = self.ratio(part)
        if self.failure(part):
            return "needed"
        if ratio is None or ratio.num_rounds < SCREENING_ROUNDS or ratio.ci is None:
            return "not measured"
        return judged(ratio, self.margin)

    def estimate(self, knob: str) -> float:
        """Returns the knob's estimated effect; infinite without an estimate, because the effect may be of any size."""
        found = self._estimates.get(knob)
        return found.ratio if found else math.inf

    def is_clear(self, knob: str) -> bool:
        """Whether a knob's estimated effect certainly exceeds the margin."""
        found = self._estimates.get(knob)
        return found is not None and found.ci is not None and found.ci[0] > 1 + self.margin

    def vagueness(self, knob: str) -> float:
        """Returns half the width of an effect's interval, on the log scale; infinite without an interval.

        If an effect was both measured and estimated, the narrower interval counts.
        """
        return min(_width(self._estimates.get(knob)), _width(self.ratio(self.parts[knob]))) / 2

    def num_measured(self, key: ConfigurationKey) -> int:
        """Returns how often a configuration was measured in the whole study."""
        return len(self._known.get(key, ()))

    def together(self, without: Sequence[str] = ()) -> Part | None:
        """Returns the winner without any of the changes that seem to have no effect; None if no change can be left out.

        A knob that was not measured alone is judged by its estimate. If rounds show that the winner is faster than this part,
        the reverted change with the largest effect is kept after all. This is repeated until rounds no longer show that.

        Args:
            without: knobs that are not considered.
        """
        found: dict[str, float] = {}
        for knob, part in self.parts.items():
            ratio, worth = self.ratio(part), self.worth(knob)
            if knob in without or worth in ("faster", "needed"):
                continue
            if worth == "not measured":
                if self.estimate(knob) <= 1 + ESTIMATED_FRAC:
                    found[knob] = self.estimate(knob)
            elif ratio and (worth in ("same", "slower") or ratio.ratio <= 1 + SUSPECT_MARGINS * self.margin):
                found[knob] = ratio.ratio
        while found:
            part = part_of(self._space, self._winner, found)
            if not self._is_inferior(part):
                return part
            del found[max(found, key=lambda knob: found[knob])]
        return None

    def minimal(self) -> Part | None:
        """Returns the part to export instead of the winner; None if the winner itself is exported.

        A part qualifies if it was measured against the winner, loses no more than the margin (at most MAX_LOSS_FRAC) and is not
        slower according to the estimates. It must keep every change with a proven effect, except changes of tier `training`
        that gain too little. Of these parts, the one with the fewest changes is returned.

        Exception: a part with even fewer changes is returned instead if it was measured at least once and lacks only changes
        that `idle()` leaves out. There may have been no time for more rounds.
        """
        wanted = {knob for knob in self.parts if self.worth(knob) in ("faster", "needed")}
        wanted -= {knob for knob in wanted if self._is_too_little_for_training(knob)}
        able = [
            part
            for key, ratio in self._ratios.items()
            if (part := part_of(self._space, self._winner, set(self._winner.changed) - {knob for knob, _ in key})).key == key
            and wanted <= {knob for knob, _ in key}
            and ratio.num_rounds >= SCREENING_ROUNDS
            and ratio.ratio <= 1 + self.loss_frac
            and not self._is_inferior(part)
            and not self._is_refuted(part, ratio)
        ]
        found = min(able, key=lambda part: (len(part.key), self._ratios[part.key].ratio)) if able else None
        estimated = min(self._measured_without(self.idle()), key=lambda part: len(part.key), default=None)
        if estimated and (found is None or len(estimated.key) < len(found.key)):
            return estimated
        return found

    def _is_refuted(self, part: Part, ratio: stats.Ratio) -> bool:
        """Whether a part is slower according to the estimates from all trials; False if the part's rounds suffice to decide."""
        if ratio.num_rounds >= DECIDED_AFTER or (ratio.ci is not None and ratio.ci[1] <= 1 + ESTIMATED_FRAC):
            return False
        known = [self.estimate(knob) for knob in part.keys if knob in self._estimates]
        return math.prod(max(1.0, gain) for gain in known) > 1 + ESTIMATED_FRAC

    def _measured_without(self, idle: Part | None) -> list[Part]:
        """Returns the measured parts that keep every change that `idle` keeps.

        A part must also lack the changes of tier `training` that `idle` leaves out for gaining too little.
        """
        wanted = {knob for knob in idle.keys if self._is_too_little_for_training(knob)} if idle else set()
        found = []
        for key in self._known:
            missing = set(self._winner.changed) - {knob for knob, _ in key}
            if idle and missing and wanted <= missing <= idle.keys | set(idle.also):
                part = part_of(self._space, self._winner, missing)
                is_slow = self._is_inferior(part) or self._is_far_slower(part)
                found += [part] if part.key == key and not is_slow else []
        return found

    def idle(self) -> Part | None:
        """Returns the winner without its ineffective changes; None if every change has an effect.

        A change is ineffective if its estimated gain is at most MARGIN_FRAC, or at most ESTIMATED_FRAC with a LIKELY_CONFIDENCE
        interval that includes a loss. The same holds for changes whose effects are only estimated together. Estimates that are
        vague or contradict a measurement do not count. The least effective changes are dropped first, until the expected total
        cost would exceed ESTIMATED_FRAC. A change of tier `training`, such as another batch size, is also dropped if its effect
        is known well enough and unlikely to exceed the machine's spread. If trials show that the winner is far slower without
        all these changes, fewer are dropped.
        """
        able = [knob for knob, part in self.parts.items() if not self.failure(part)]
        gains = {frozenset([knob]): self.estimate(knob) for knob in able if self._is_too_little_for_training(knob)}
        small = {frozenset([knob]): self.estimate(knob) for knob in able if self._is_doubtful(knob)}
        small |= {knobs: ratio.ratio for knobs, ratio in self._joint.items() if knobs <= set(able) and _is_little(ratio)}
        loss = 0.0
        for knobs in sorted(small.keys() - gains.keys(), key=lambda knobs: small[knobs]):
            loss += max(0.0, math.log(small[knobs]))
            if loss > math.log(1 + ESTIMATED_FRAC):
                break
            gains[knobs] = small[knobs]
        # Two changes may have the same effect: either can be left out, but not both. Then the more effective one is kept.
        put_back = sorted(gains, key=lambda knobs: gains[knobs])
        while put_back:
            part = part_of(self._space, self._winner, frozenset().union(*put_back))
            if part.key and not self._is_inferior(part) and not self._is_far_slower(part):
                return part
            put_back.pop()
        return None

    def _is_too_little_for_training(self, knob: str) -> bool:
        """Whether the effect of a change of tier `training` is known well enough, and unlikely to exceed the machine's spread.

        False for all changes of lower tiers.
        """
        worth = self.worth(knob)
        found = self.ratio(self.parts[knob]) if worth in MEASURED else self._estimates.get(knob)
        likely = stats.at_confidence(found, LIKELY_CONFIDENCE) if found else None
        tier = self._space.tier({knob: self._winner.changed[knob]})
        if tier is not Tier.training or worth == "needed" or found is None or found.ci is None or likely is None:
            return False
        is_vague = likely[1] > 1 + MOST_LOST_TRAINING_FRAC
        is_little = found.ratio <= 1 + self._training_frac or likely[0] < 1
        return is_little and not is_vague and not self._is_far_slower(self.parts[knob])

    def _is_doubtful(self, knob: str) -> bool:
        found, measured = self._estimates.get(knob), self.ratio(self.parts[knob])
        if found is None or self.worth(knob) in ("faster", "needed"):
            return False
        # An estimate does not overrule a measured gain.
        is_gain = measured is not None and measured.ratio > 1 + stats.MARGIN_FRAC
        return _is_little(found) and not is_gain and not self._is_far_slower(self.parts[knob])

    def _is_far_slower(self, part: Part) -> bool:
        """Whether all trials together show that a part is slower than the winner, by more than noise explains."""
        own, other = (self._known.get(key, ()) for key in (configuration_key(self._winner.changed), part.key))
        if not own or not other:
            return False
        gain = float(np.mean(np.log(own)) - np.mean(np.log(other)))
        return gain > FAR * self._spread * math.sqrt(1 / len(own) + 1 / len(other))

    def wanted(self, knobs: Sequence[str]) -> list[Part]:
        """Returns the parts to measure in the next round; [] once everything is decided.

        Args:
            knobs: the knobs that there is time to revert one by one.
        """
        if self.num_rounds >= MAX_ROUNDS:
            return []
        able = [knob for knob in knobs if not self.failure(self.parts[knob])]
        new = [knob for knob in able if self.worth(knob) == "not measured"]
        if new and len(knobs) == len(self.parts):
            return [self.parts[knob] for knob in new]
        whole = self.together(without=new)
        put_back = whole.keys if whole else frozenset()
        single = [self.parts[knob] for knob in new or able if knob not in put_back and (new or self._is_open(knob))]
        return single if whole is None or self._is_settled(whole) else [whole, *single]

    def changes(self) -> list[Change]:
        """Returns every change with its effect, largest first."""
        minimal = self.minimal()
        kept = {key for key, _ in minimal.key} if minimal else set(self._winner.changed)
        found = [self._change(knob, is_kept=knob in kept) for knob in self._winner.changed]
        return sorted(found, key=lambda change: (-(change.ratio.ratio if change.ratio else 0.0), change.knob))

    def _change(self, knob: str, *, is_kept: bool) -> Change:
        part, worth = self.parts[knob], self.worth(knob)
        failure, ratio = self.failure(part), self.ratio(part)
        basis: Basis = "" if failure or worth == "not measured" else "measured"
        estimate = self._estimates.get(knob)
        # An estimate from all trials is often more precise than two rounds. The narrower interval is used, whatever values it
        # contains, so the choice favours no result.
        is_vague = (
            worth == "ambiguous" and ratio is not None and ratio.num_rounds < FEW_ROUNDS and _width(estimate) < _width(ratio)
        )
        if estimate and (worth == "not measured" or is_vague):
            basis, worth, ratio = "estimated", judged(estimate, self.margin), estimate
        why_not = "no time" if is_kept else "reverted only together with others"
        reason = f"without it: {failure.outcome}" if failure else why_not if worth == "not measured" else ""
        return Change(
            knob=knob,
            before=self._space.reference.get(knob),
            after=self._winner.changed[knob],
            also=part.also,
            ratio=ratio if basis else None,
            worth=worth,
            is_kept=is_kept,
            basis=basis,
            reason=reason,
        )

    def _is_open(self, knob: str) -> bool:
        """Whether more rounds are useful for a knob: its effect is ambiguous, or not known precisely enough."""
        ratio, worth = self.ratio(self.parts[knob]), self.worth(knob)
        if worth == "ambiguous":
            return True
        if worth != "faster" or ratio is None or ratio.ci is None:
            return False
        return (ratio.ci[1] - ratio.ci[0]) / 2 > max(self.margin, NARROW_FRAC * (ratio.ratio - 1))

    def _is_inferior(self, part: Part) -> bool:
        """Whether the rounds show that the winner needs the changes that a part lacks: the part failed, or it is slower."""
        ratio = self.ratio(part)
        if self.failure(part):
            return True
        if ratio is None or ratio.ci is None or ratio.num_rounds < SCREENING_ROUNDS:
            return False
        is_doubtful = ratio.num_rounds >= DECIDED_AFTER and ratio.ratio > 1 + self.loss_frac
        return is_doubtful or stats.verdict(ratio, self.margin) == "faster"

    def _is_settled(self, part: Part) -> bool:
        """Whether a part needs no more rounds: it is shown to be as fast as the winner, or measured in DECIDED_AFTER rounds."""
        ratio = self.ratio(part)
        if ratio is None or ratio.ci is None or ratio.num_rounds < SCREENING_ROUNDS:
            return False
        return ratio.num_rounds >= DECIDED_AFTER or ratio.ci[1] <= 1 + self.loss_frac


def judged(ratio: stats.Ratio, margin: float) -> Worth:
    """Returns the verdict of `stats.verdict` on an effect, or "slower" if that is "ambiguous" and the interval lies below 1."""
    verdict = stats.verdict(ratio, margin)
    return "slower" if verdict == "ambiguous" and ratio.ci is not None and ratio.ci[1] < 1 else verdict


def _is_little(estimate: stats.Ratio) -> bool:
    """Whether a change with this estimated effect can be left out.

    False for a vague estimate: if little is known about a change, its estimate shrinks towards no effect.
    """
    likely = stats.at_confidence(estimate, LIKELY_CONFIDENCE)
    is_unlikely = estimate.ratio <= 1 + stats.MARGIN_FRAC or likely is None or likely[0] < 1
    is_vague = likely is not None and likely[1] > 1 + MOST_LOST_FRAC
    return estimate.ratio <= 1 + ESTIMATED_FRAC and is_unlikely and not is_vague


def _width(ratio: stats.Ratio | None) -> float:
    """Returns the width of an interval, on the log scale; infinite without one."""
    return math.log(ratio.ci[1] / ratio.ci[0]) if ratio and ratio.ci else math.inf
