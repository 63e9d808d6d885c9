"""Budgets a study's time: what is left, what is reserved for the finals, what a trial will cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from autotune.clock import Clock
from autotune.harness.protocol import MeasureRules
from autotune.knobs.catalogue import OUTSIDE_GRAPHS
from autotune.records import Knobs, KnobValue, TrialRecord
from autotune.trials.events import Outlook

# Maximum share of the budget for the finals. For a slow program, one round to choose the winner and three pairs of baseline
# and winner take about this share.
FINALS_MAX_FRAC = 0.38
# Late proposals are configurations that need a compilation, and the best ones of lower tiers. They get at most this share of
# the search's time, because a good configuration matters more than trying every compile mode.
LATE_MAX_FRAC = 0.5
FINALS_TRIALS = 20  # time is reserved for this many trials of the finals: eight pairs and a choosing round of four
# Time is reserved for this many loss comparisons: a run of the baseline, and one with the finalists' changes of arithmetic.
PARITY_TRIALS = 2
PARITY_S = 5.0  # time reserved for the steps of each run; slow programs take up to 20 s, at the expense of the finals
LEAST_STEPS = MeasureRules.slow_min_steps  # minimum number of steps of any window
# Longest window of a search trial, as a share of the budget. On a noisy machine, waiting for a narrow interval would take too
# much time from other trials.
SEARCH_WINDOW_FRAC = 1 / 30
# Longest warm-up, and longest window that waits for whole cycles of steps, as a share of the budget. Without this limit, a
# program that never becomes steady, or that has random gaps, could use up the budget before it is measured.
UNSTEADY_MAX_FRAC = 1 / 4
# Assumed length of the window in a trial of the finals, unless its steps are slow. A longer window gains little, because rates
# vary more between processes than within one.
FINALS_WINDOW_S = 5.0
# Maximum share of the budget for the attribution (ablation trials, which show what each change of the winner gains). The
# attribution may also use time that the finals do not need.
ATTRIBUTION_MAX_FRAC = 0.18
ATTRIBUTION_TRIALS = 18  # time is reserved for this many ablation trials: three rounds of a winner with five changes
# Number of trials of the smallest ablation: two rounds of a winner with two changes. If fewer trials fit, less is reserved.
ATTRIBUTION_MIN_TRIALS = 6
# Share of the search's time after which late proposals begin: late enough to have found a good configuration, early enough for
# costly values to fit.
LATE_FRAC = 0.65
# The finals may get at most this share of the budget in addition to FINALS_MAX_FRAC, for enough pairs to give an interval.
CONFIRMING_FRAC = 0.10
LARGE_FRAC = 0.25  # replaces CONFIRMING_FRAC for a large effect, because its confirmation is more useful than further trials
CONFIRMING_ROUNDS = 3  # pairs needed to show that a winner wins
OVERRUN_FRAC = 0.5  # share of the reserve that a search trial must leave, even if it takes longer than expected
MARGIN = 1.25  # a search trial may always take this many times its expected duration
EXPLAIN_MAX_FRAC = 0.1  # maximum share of the budget for the passes that explain the result
# Time to end the last processes, write the verdict and finish tracking: this share of the budget, but at most CLOSING_MAX_S.
CLOSING_FRAC, CLOSING_MAX_S = 0.05, 6.0
COMPILE_S = 60.0  # assumed cost of a compilation until one was seen: resnet18's training step on two cores
CACHED_FRAC = 0.25  # assumed share of a compilation's time that a full compile cache does not save; 0.1 for resnet18
NUM_LATEST, NUM_NEAR = 5, 3  # trials from which a cost is predicted: the latest, or those with the nearest batch sizes
_BATCH = "loader.batch_size"


@dataclass(kw_only=True)
class Budget:
    """How much time and how many trials a study may use, and has left.

    Attributes:
        clock: source of time.
        total_s: wall time for everything; None for unlimited.
        max_trials: search trials; None for unlimited.
        reserved_s: part of `total_s` reserved for what follows the search.
        attribution_s: the attribution's part of `reserved_s`; the rest is for the finals.
        explain_s: part of the budget reserved for the passes that explain the result; 0 once they run.
        before_s: time that earlier runs of the study have used.
        started: `clock.monotonic()` when the command began, if that is known; otherwise when this run began.
    """

    clock: Clock
    total_s: float | None
    max_trials: int | None = None
    reserved_s: float = 0.0
    attribution_s: float = 0.0
    explain_s: float = 0.0
    before_s: float = 0.0
    started: float | None = None

    def __post_init__(self) -> None:
        self._started = self.clock.monotonic() if self.started is None else self.started

    @property
    def spent_s(self) -> float:
        """Wall time the study has taken, including its earlier runs."""
        return self.before_s + self.clock.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """Wall time left for trials."""
        return math.inf if self.total_s is None else self.total_s - closing_s(self.total_s) - self.explain_s - self.spent_s

    @property
    def explain_max_s(self) -> float:
        """Maximum wall time that explaining may take."""
        return EXPLAIN_MAX_FRAC * (self.spent_s if self.total_s is None else self.total_s)

    @property
    def search_left_s(self) -> float:
        """Wall time left for the search."""
        return self.left_s - self.reserved_s

    def ends_s(self, *, kept_s: float = 0.0) -> float | None:
        """Returns the moment on the clock at which `kept_s` of the budget is left; None for an unlimited budget."""
        return None if self.total_s is None else self.clock.monotonic() + self.left_s - kept_s

    def search_ends_s(self, expected_s: float) -> float | None:
        """Returns the moment on the clock when a search trial must end; None for an unlimited budget.

        It must leave OVERRUN_FRAC of the reserve, but it may always take MARGIN * `expected_s`.
        """
        return self.ends_s(kept_s=max(0.0, min(OVERRUN_FRAC * self.reserved_s, self.left_s - MARGIN * expected_s)))

    def reserve(self, baseline: TrialRecord) -> None:
        """Reserves time for finals and attribution, estimated from the baseline's duration.

        If the program is too slow to measure two effects, less is reserved for attribution, because the search can use that
        time better.
        """
        if self.total_s is None:
            return
        each_s = _confirming_s(baseline) if _has_cycles(baseline) else again_start_s(baseline) + FINALS_WINDOW_S
        parity_s = PARITY_TRIALS * (again_start_s(baseline) + PARITY_S)
        most_s = ATTRIBUTION_MAX_FRAC * self.total_s
        self.attribution_s = (
            min(most_s, ATTRIBUTION_TRIALS * each_s) * min(1.0, most_s / (ATTRIBUTION_MIN_TRIALS * each_s)) ** 2
        )
        self.reserved_s = min(FINALS_MAX_FRAC * self.total_s, FINALS_TRIALS * each_s + parity_s) + self.attribution_s
        self.keep_for(2 * CONFIRMING_ROUNDS * each_s + parity_s)

    def reserve_passes(self, each_s: Sequence[float]) -> None:
        """Reserves time for the passes that explain the result, which take `each_s`; none if not even the first fits."""
        if self.total_s is not None and each_s and each_s[0] <= self.explain_max_s:
            self.explain_s = min(self.explain_max_s, sum(each_s))

    def take_from_passes(self, needed_s: float) -> bool:
        """Lowers the passes' reserve until `needed_s` is left and returns True. If that cannot suffice, only returns False."""
        missing_s = needed_s - self.left_s
        if missing_s > self.explain_s:
            return False
        self.explain_s -= max(0.0, missing_s)
        return True

    def keep_for(self, finals_s: float, *, is_large: bool = False) -> None:
        """Raises the finals' reserve to `finals_s`, within bounds that are wider for a large effect; never lowers it."""
        if self.total_s is not None:
            finals_s = min((FINALS_MAX_FRAC + (LARGE_FRAC if is_large else CONFIRMING_FRAC)) * self.total_s, finals_s)
            most_s = max((FINALS_MAX_FRAC + ATTRIBUTION_MAX_FRAC) * self.total_s, finals_s)
            self.reserved_s = max(self.reserved_s, min(most_s, finals_s + self.attribution_s))

    def screening_rules(self, rules: MeasureRules) -> MeasureRules:
        """Returns the search's rules, with warm-ups and windows short enough to leave time for other trials."""
        if self.total_s is None:
            return rules
        window_s = max(2 * rules.min_s, SEARCH_WINDOW_FRAC * self.total_s)
        return dataclasses.replace(
            rules,
            max_s=min(rules.max_s, window_s),
            slow_max_s=min(rules.slow_max_s, window_s),
            cycles_max_s=min(rules.cycles_max_s, max(window_s, UNSTEADY_MAX_FRAC * self.total_s)),
            warmup_max_s=min(rules.warmup_max_s, max(rules.warmup_min_device_s, UNSTEADY_MAX_FRAC * self.total_s)),
        )

    def is_time_for_late(self, num_searched: int, late_s: Sequence[float], *, late_frac: float = LATE_FRAC) -> bool:
        """Whether it is time to try the late proposals (costly values, lower tiers), so that they still fit.

        Args:
            num_searched: search trials so far.
            late_s: expected cost of each late proposal.
            late_frac: share of the search after which it is always time.
        """
        share_s = math.inf if self.total_s is None else self.total_s - self.reserved_s
        if self.max_trials is not None and num_searched >= min(late_frac * self.max_trials, self.max_trials - len(late_s)):
            return True
        kept_s = min(sum(late_s), LATE_MAX_FRAC * share_s)
        return self.spent_s >= min(late_frac * share_s, share_s - kept_s)

    def fits(self, expected_s: float, *, again_s: float, has_finalist: bool = True) -> bool:
        """Whether a trial fits into the rest of the search, and the finals would have time to confirm it.

        Args:
            expected_s: its expected cost now.
            again_s: its expected cost in each round of the finals.
            has_finalist: whether the finals have something to measure. If not, the trial may use all of the finals' time except
                that of one pair.
        """
        if self.total_s is None:
            return True
        if not has_finalist:
            return _least_s(expected_s, again_s) <= self.left_s
        more_s = CONFIRMING_ROUNDS * again_s - (self.reserved_s - self.attribution_s)
        can_be_confirmed = more_s <= CONFIRMING_FRAC * self.total_s
        return expected_s + max(0.0, more_s) <= self.search_left_s and can_be_confirmed

    def needed_s(self, expected_s: float, *, again_s: float) -> float:
        """Returns the budget in which a first trial of this cost would have fitted: seconds, rounded up to full minutes."""
        needed_s = self.spent_s + _least_s(expected_s, again_s)
        return 60 * math.ceil(min(needed_s / (1 - CLOSING_FRAC), needed_s + CLOSING_MAX_S) / 60)


def closing_s(total_s: float) -> float:
    """Returns the part of a budget reserved for the work after the last trial."""
    return min(CLOSING_FRAC * total_s, CLOSING_MAX_S)


def most_reserved_s(total_s: float) -> float:
    """Returns the maximum time reserved for finals, attribution and closing, regardless of the baseline's duration."""
    return (FINALS_MAX_FRAC + ATTRIBUTION_MAX_FRAC) * total_s + closing_s(total_s)


def _least_s(expected_s: float, again_s: float) -> float:
    """Returns the cost of a trial and one pair of finals."""
    return expected_s + 2 * again_s


def again_start_s(record: TrialRecord) -> float:
    """Returns the seconds that a repetition of a trial takes outside its window, with the trial's code in the compile cache.

    The cache matters for a program that compiles its model itself: only its baseline runs with an empty cache.
    """
    return without_window_s(record) - _spared_by_cache_s(record)


def _spared_by_cache_s(record: TrialRecord) -> float:
    return (1 - CACHED_FRAC) * record.phases_s.get("compile", 0.0)


def without_window_s(record: TrialRecord) -> float:
    """Returns the seconds a trial took outside its window."""
    return max(0.0, record.attempt_s - record.phases_s.get("steady", 0.0))


def finals_rules(rules: MeasureRules, *, seconds_each: float, baseline: TrialRecord) -> MeasureRules:
    """Returns the finals' rules, with windows short enough for many rounds: more rounds beat longer windows.

    Args:
        rules: the configured rules.
        seconds_each: time that one trial of the finals may take.
        baseline: gives the time that a trial takes outside its window.
    """
    window_s = max(2 * rules.min_s, seconds_each - without_window_s(baseline))
    return dataclasses.replace(rules, max_s=min(rules.max_s, window_s), slow_max_s=min(rules.slow_max_s, window_s))


class Costs:
    """Predicts what trials cost, from past trials."""

    def __init__(self, costly: Mapping[str, Mapping[KnobValue, float]]) -> None:
        """Begins without trials.

        Args:
            costly: {knob whose values cost a compilation: {value: cost relative to the cheapest value}}; missing values count
                as 1.
        """
        self._costly = costly
        self._plain: deque[TrialRecord] = deque(maxlen=NUM_LATEST)
        self._by_batch: dict[float, deque[TrialRecord]] = {}  # batch size -> its latest trials
        self._compile_s: dict[tuple[str, KnobValue], float] = {}
        self._compiled = set[frozenset[tuple[str, KnobValue]]]()  # what was compiled so far, see `_graphs`
        self._found_s: dict[tuple[Any, float | None], float] = {}  # results of `_plain_s`, until there is another trial

    def learn(self, record: TrialRecord) -> None:
        """Records a finished trial."""
        if not record.outcome.has_value:
            return
        costly = [(key, record.changed[key]) for key in self._costly if key in record.changed]
        if not costly:
            self._plain.append(record)
            self._found_s = {}
            if (batch := _number(record.knobs.get(_BATCH))) is not None:
                self._by_batch.setdefault(batch, deque(maxlen=NUM_NEAR)).append(record)
        elif (graphs := self._graphs(record.knobs, record.changed)) not in self._compiled:
            self._compiled.add(graphs)
            for entry in costly:
                self._compile_s[entry] = max(record.attempt_s - self._plain_s(record.knobs), 0.0)

    def expected_s(self, knobs: Knobs, changed: Knobs) -> float:
        """Returns the expected seconds of a search trial of this configuration; errs on the high side."""
        is_cached = self._graphs(knobs, changed) in self._compiled
        return self._plain_s(knobs) + (CACHED_FRAC if is_cached else 1.0) * self._cold_compile_s(changed)

    def again_s(self, knobs: Knobs, changed: Knobs) -> float:
        """Returns the minimum time to measure a configuration again, in a fresh process with a warm compile cache.

        Counts only the part of the search trial's window that a trial of the finals needs. The whole window may be longer,
        because it restarted or was extended to get an interval.
        """
        return self._plain_s(knobs, _confirming_s) + CACHED_FRAC * self._cold_compile_s(changed) + self.spared_s

    @property
    def spared_s(self) -> float:
        """Maximum time that a recent warm start has saved compared with a fresh start; 0 if there was no warm start."""
        return max((record.spared_s for record in self._plain), default=0.0)

    def compile_s(self, key: str, value: KnobValue) -> float:
        """Returns the seconds that a costly value adds to a trial: observed, scaled from another value's, or assumed."""
        if (key, value) in self._compile_s:
            return self._compile_s[key, value]
        relative = self._costly.get(key, {})
        seen = [seconds / relative.get(other, 1.0) for (knob, other), seconds in self._compile_s.items() if knob == key]
        return max(seen, default=COMPILE_S) * relative.get(value, 1.0)

    def _cold_compile_s(self, changed: Knobs) -> float:
        return sum(self.compile_s(key, changed[key]) for key in self._costly if key in changed)

    def _graphs(self, knobs: Knobs, changed: Knobs) -> frozenset[tuple[str, KnobValue]]:
        """Returns what a configuration compiles: its values except those of OUTSIDE_GRAPHS."""
        costly = {key: changed[key] for key in self._costly if key in changed}
        return frozenset((key, value) for key, value in {**knobs, **costly}.items() if key not in OUTSIDE_GRAPHS)

    def _plain_s(self, knobs: Knobs, seconds_of: Callable[[TrialRecord], float] = lambda record: record.attempt_s) -> float:
        batch = _number(knobs.get(_BATCH))
        if (seconds_of, batch) not in self._found_s:
            self._found_s[seconds_of, batch] = self._nearest_s(batch, seconds_of)
        return self._found_s[seconds_of, batch]

    def _nearest_s(self, batch: float | None, seconds_of: Callable[[TrialRecord], float]) -> float:
        if not self._plain:
            return 0.0
        if batch is None or not self._by_batch:
            return max(map(seconds_of, self._plain))
        nearest = sorted(self._by_batch, key=lambda other: abs(math.log(batch / other)))
        near = itertools.islice(itertools.chain.from_iterable(self._by_batch[other] for other in nearest), NUM_NEAR)
        return max(_scaled_s(record, batch, seconds_of(record)) for record in near)


def _has_cycles(record: TrialRecord) -> bool:
    return bool(record.metrics.get("window_cycles"))


def _confirming_s(record: TrialRecord) -> float:
    """Returns what a repetition costs, with only the window that the finals need: a few seconds, or LEAST_STEPS slow steps."""
    if _has_cycles(record):
        return record.attempt_s - _spared_by_cache_s(record)
    steady_s, num_steps = record.phases_s.get("steady", 0.0), record.metrics.get("window_steps")
    steps_s = LEAST_STEPS * record.metrics.get("window_s", steady_s) / num_steps if num_steps else steady_s
    return record.attempt_s - _spared_by_cache_s(record) - steady_s + min(steady_s, max(FINALS_WINDOW_S, steps_s))


def _scaled_s(record: TrialRecord, batch: float, seconds: float) -> float:
    """Returns a trial's estimated seconds at another batch size: larger steps take longer in proportion, smaller as long."""
    growth = max(1.0, batch / (_number(record.knobs.get(_BATCH)) or batch))
    # A window usually ends by time, whatever the batch size. But it has a minimum number of steps, so slower steps can make it
    # longer, by a factor of at most 4.
    return record.start_s + (seconds - record.start_s) * min(growth, 4.0) if growth > 1 else seconds


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def outlook(
    budget: Budget,
    baseline: TrialRecord,
    seconds: Sequence[float],
    *,
    warm_spares_s: float,
    is_searching: bool = True,
    is_room: bool = True,
    num_slots: int = 1,
) -> Outlook:
    """Returns how much time and how many trials a study has left.

    Args:
        budget: the study's budget; the reserve for the finals is known once the baseline was measured.
        baseline: trial 0.
        seconds: durations of the search trials so far, ascending.
        warm_spares_s: part of the baseline's time that a warm start saves a search trial.
        is_searching: whether the next trial is a search trial.
        is_room: whether a first search trial and its finals fit in all the time that is left, the finals' reserve included.
        num_slots: how many search trials run in parallel.
    """
    left_s = None if budget.total_s is None else max(0.0, budget.left_s + budget.explain_s)
    if not is_searching:
        return Outlook(left_s=left_s, explain_s=budget.explain_s)
    middle = seconds[(len(seconds) - 1) // 2 : len(seconds) // 2 + 1]  # one or two values
    trial_s = median(middle) if seconds else max(1.0, baseline.attempt_s - warm_spares_s)
    search_s = None if budget.total_s is None else max(0.0, budget.search_left_s)
    fitting = math.inf if search_s is None else num_slots * search_s / max(trial_s, 1e-9)
    allowed = math.inf if budget.max_trials is None else max(0, budget.max_trials - len(seconds))
    if not seconds:
        fitting = max(1.0, fitting) if is_room else 0.0
    num_trials = min(fitting, allowed)
    return Outlook(
        left_s=left_s,
        explain_s=budget.explain_s,
        search_s=search_s,
        num_trials=None if math.isinf(num_trials) else round(num_trials),
        trial_s=trial_s,
        num_searched=len(seconds),
    )
