"""Decides what a search may still try with the time and the trials that are left, and what it leaves to the finals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.compare.decision import MIN_GAIN_FRAC
from autotune.compare.finals import LARGE_EFFECT, LOOKS
from autotune.quantities import seconds_text
from autotune.records import Knobs, KnobValue, Outcome, Tier, TrialRecord
from autotune.study.initial import NUM_LED_SEEDS
from autotune.trials.budget import CONFIRMING_ROUNDS
from autotune.trials.session import Session

# After the search, ANSWER_ROUNDS rounds of ablation and ANSWER_PAIRS pairs of finals should still be measured. If the time left
# is too short for these, each further search trial shortens them. Then a trial with an expected improvement below
# ANSWER_GAIN_FRAC is not worth its time, and the search ends after ANSWER_AFTER proposals of such trials in a row.
ANSWER_GAIN_FRAC = 0.03
ANSWER_AFTER = 2
ANSWER_ROUNDS, ANSWER_PAIRS = 4, LOOKS[0]
# Even with several slots, RatesSampler's first NUM_ALONE trials run one after another: the expert's configurations, and the
# best of them with the largest batch that fits. Each is chosen by what the one before it showed. If all began at once, a single
# setting could make them all fail. Then a calibration measures how much parallel trials slow each other down, with the best of
# these trials. With the baseline, it would take longer than these trials, and would be repeated once the best is much faster.
NUM_ALONE = NUM_LED_SEEDS + 1
# At most FIRST_AT_ONCE trials may run at once, or as many as have finished if that is more. Without this limit, all slots would
# start with trials that are chosen from the baseline alone, and such trials find little. Seven recorded tables were replayed
# with 16 slots, each eight times. The yardstick is the best of ten trials that run one after another. The first ten trials in
# parallel reached .994 of it with the limit and .748 without, and the limit cost no time. With more than MAX_HELD_SLOTS slots,
# there is no limit: there are so many trials that a few uninformed ones matter less than idle slots.
FIRST_AT_ONCE, MAX_HELD_SLOTS = 4, 64
OUT_OF_TIME = "the search's part of the budget is used"  # the remaining time belongs to the finals
TOO_DEAR = "the rest of the budget is too small to try and confirm another configuration"
OUT_OF_TRIALS = "the trial budget is used"


class SearchBudget:
    """A search's share of a study's budget.

    Args:
        session: the study.
        is_led: whether RatesSampler leads the search.
    """

    def __init__(self, session: Session, *, is_led: bool) -> None:
        self._session, self._is_led, self._num_objectives = session, is_led, len(session.runner.goal.names)
        self._num_small = 0  # proposals in a row whose expected improvement is small

    @property
    def num_searched(self) -> int:
        """Number of configurations that were searched."""
        return self._session.tally.num_over - 1

    @property
    def num_begun(self) -> int:
        """Number of configurations that were searched or are being measured now."""
        return self.num_searched + self._session.schedule.num_running

    def why_over(self) -> str:
        """Returns why nothing more may be tried; "" if the search may go on."""
        limit = self._session.budget.max_trials
        if limit is not None and self.num_begun >= limit:
            return OUT_OF_TRIALS
        return "" if self._left_s > 0 else OUT_OF_TIME

    @property
    def is_one_at_a_time(self) -> bool:
        """Whether the next trial has to run alone even if there are slots; see NUM_ALONE."""
        return self._is_held_back and self.num_searched < NUM_ALONE

    @property
    def most_at_once(self) -> int:
        """The number of trials that may run at once; see FIRST_AT_ONCE."""
        if not self._is_held_back:
            return self._session.schedule.num_slots
        return 1 if self.is_one_at_a_time else max(FIRST_AT_ONCE, self.num_searched)

    @property
    def _is_held_back(self) -> bool:
        return self._is_led and len(self._session.runner.beside) <= MAX_HELD_SLOTS

    def fits(self, knobs: Knobs) -> bool:
        """Whether there is time to measure a configuration and to confirm it."""
        if self._session.budget.total_s is None:  # a sampler calls this for thousands of configurations
            return True
        expected_s, again_s = self._costs_of(knobs, self._session.resolved.changed(knobs))
        return self._session.budget.fits(expected_s, again_s=again_s, has_finalist=self._has_finalist)

    def why_nothing_fits(self) -> str:
        """Returns why no configuration fits: there is no time even for a cheap trial, or no time to confirm a further one."""
        expected_s, _ = self._costs_of(self._session.baseline.knobs, {})
        return TOO_DEAR if expected_s <= self._left_s else OUT_OF_TIME

    def why_nothing_was_tried(self, reason: str) -> str:
        """Returns a message with the budget needed if not even one configuration fitted; "" otherwise.

        Args:
            reason: why the search ended.
        """
        session = self._session
        total_s, baseline = session.budget.total_s, session.baseline
        if self.num_searched or total_s is None or reason not in (OUT_OF_TIME, TOO_DEAR):
            return ""
        expected_s, again_s = self._costs_of(baseline.knobs, {})
        if session.budget.fits(expected_s, again_s=again_s, has_finalist=False):
            return ""  # a configuration as cheap as the baseline would have fitted
        needed_s = session.budget.needed_s(expected_s, again_s=again_s)
        needed_s = max(needed_s, 60 * (math.floor(total_s / 60) + 1))
        return (
            f"one more trial and its finals do not fit the budget of {seconds_text(total_s)}: a trial takes about "
            f"{seconds_text(baseline.attempt_s)} here, so give study.budget.minutes={needed_s / 60:.0f} at least"
        )

    def keep_for_finals(self, best: TrialRecord) -> None:
        """Reserves time to confirm the best so far, because its trials may take longer than the baseline's."""
        is_large = (best.score or 0.0) > LARGE_EFFECT * (self._session.baseline.score or math.inf)
        self._session.budget.keep_for(CONFIRMING_ROUNDS * self._pair_s(best), is_large=is_large)

    def is_time_for_late(self, best: TrialRecord, costly: Sequence[tuple[str, KnobValue]]) -> bool:
        """Whether to make the late proposals, the search's last: the best so far with each costly value, and for each tier."""
        costs = self._session.costs
        costly_s = [costs.expected_s(best.knobs, {**best.changed, key: value}) for key, value in costly]
        late_s = [*costly_s, *[costs.expected_s(best.knobs, best.changed)] * len(Tier)]
        return self._session.budget.is_time_for_late(self.num_begun, late_s)

    def is_time_for_tiers(self, best: TrialRecord) -> bool:
        """Whether to make the late proposals if these are only the best so far, restricted to each tier."""
        each_s = self._session.costs.expected_s(best.knobs, best.changed)
        return self._session.budget.is_time_for_late(self.num_begun, [each_s] * len(Tier), late_frac=1.0)

    def weigh(self, best: TrialRecord, expected_improvement: float | None) -> None:
        """Counts proposals in a row whose expected gain does not justify the time they take from ablation and finals."""
        session = self._session
        again_s = session.costs.again_s(best.knobs, best.changed)
        answer_s = ANSWER_PAIRS * self._pair_s(best) + ANSWER_ROUNDS * (len(best.changed) + 1) * again_s
        is_short = session.budget.left_s < answer_s
        is_small = expected_improvement is not None and expected_improvement < ANSWER_GAIN_FRAC
        self._num_small = self._num_small + 1 if is_short and is_small and session.inputs.config.search.stop else 0

    @property
    def is_for_answer(self) -> bool:
        """Whether ablation and finals are a better use of the time left than the latest proposals."""
        return self._num_small >= ANSWER_AFTER

    def ask_again(self) -> None:
        """Lets the search continue: the next proposal decides again whether it ends."""
        self._num_small = ANSWER_AFTER - 1

    def _costs_of(self, knobs: Knobs, changed: Knobs) -> tuple[float, float]:
        """Returns the expected seconds of a configuration's search trial, and of its trial in each round of the finals."""
        costs = self._session.costs
        return costs.expected_s(knobs, changed), costs.again_s(knobs, changed)

    def _pair_s(self, best: TrialRecord) -> float:
        """Returns the expected seconds of a pair of the finals: the best so far and the baseline."""
        costs = self._session.costs
        return costs.again_s(best.knobs, best.changed) + costs.again_s(self._session.baseline.knobs, {})

    @property
    def _left_s(self) -> float:
        """Wall time left for the search."""
        budget = self._session.budget
        return budget.search_left_s if self._has_finalist else budget.left_s

    @property
    def _has_finalist(self) -> bool:
        """Whether any trial so far would enter the finals. If none would, the search may use the finals' time, too."""
        best, baseline = self._session.tally.best_changed, self._session.baseline
        if best is None or self._num_objectives > 1 or baseline.outcome is Outcome.infeasible:
            return best is not None
        return best >= MIN_GAIN_FRAC * (baseline.score or 0.0)
