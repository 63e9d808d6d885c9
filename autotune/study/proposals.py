"""Proposes the next trial: initial configurations, single changes, the sampler's proposals, values that cost a compilation."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import optuna

from autotune.compare.parity import Parity
from autotune.errors import NothingWorked
from autotune.records import AGAIN, THROUGHPUT, Knobs, KnobValue, Outcome, TrialRecord
from autotune.search import RatesSampler, add_known, begin_study, make_sampler, tell
from autotune.search.samplers import CompleteGrid
from autotune.study.culprits import Culprits
from autotune.study.design import levels
from autotune.study.fewer_changes import of_lower_tiers, without_ineffective
from autotune.study.initial import LATE, Proposal, earlier_seeds, expert_seeds, filling_seed
from autotune.study.interference import Interference
from autotune.study.sampling import inform, machine_of
from autotune.study.search_budget import SearchBudget
from autotune.study.settled import MAX_CHANCES, Settled
from autotune.study.single_changes import SingleChanges
from autotune.trials.configurations import ConfigurationKey, configuration_key
from autotune.trials.schedule import Ending
from autotune.trials.session import Session

# After the sampler has proposed this many known configurations in a row (known: no trial is needed, see settled.py), the space
# counts as used up. If it has at most MAX_LISTED points, all of them are first searched for one that is left.
MAX_REPEATED_PROPOSALS, MAX_LISTED = 40, 10_000
SAMPLER_GIVES_UP_AFTER = 10  # after this many known configurations in a row, random ones replace the sampler's
MAX_REPEATED_GRID_POINTS = 5000  # maximum number of grid points in a row that differ only in inactive knobs
MAX_TOO_DEAR = 8  # maximum number of proposals in a row that do not fit the remaining budget
# Late proposals (see `_late`) wait until the running trials have ended, because one of these may become the best. If at most
# FEW_FRAC times as many trials run as have finished, this is unlikely, and waiting would only leave slots idle.
FEW_FRAC = 0.1
SINGLE, SAMPLER = "single", "sampler"  # origins of proposals; see TrialRecord.origin
EXHAUSTED = "the search space is used up"
TOO_RISKY = "every configuration left would run out of memory, or its expected gain does not justify the risk"
ANSWER_FIRST = "little improvement is expected: the time is better used to find out what each change contributes"
NO_IMPROVEMENT = "no improvement is expected: no configuration is forecast to be 2 % faster"


class Search:
    """The search of a study: proposes and measures configurations until time, trials or proposals run out.

    A search first tries cheap configurations, until most of its time is used. Then it tries the values that cost a compilation,
    each on the best configuration so far, and then the best configuration restricted to lower tiers. Any remaining time goes to
    cheap configurations again. If RatesSampler leads the search, it proposes all of these values itself.

    A resumed search follows the same steps. Trials of earlier runs are passed to the sampler and count as tried. Trials that an
    earlier run could not finish come first.
    """

    def __init__(self, session: Session, interference: Interference | None = None) -> None:
        config, space = session.inputs.config, session.resolved
        self._session, self._space, self._sampler_name = session, space, config.search.sampler
        self._interference = interference or Interference(session)
        self._parity, self._culprits = Parity(session), Culprits(space)
        self._settled = Settled(session, self._parity, self._culprits)
        self._names = session.runner.goal.names
        # Whether RatesSampler leads the search. It then makes single changes itself and decides which compilations are worth
        # their time. It needs a single objective that depends on the rate alone; otherwise TPE replaces it.
        self._is_led = self._sampler_name == "rates" and len(self._names) == 1 and session.runner.goal.follows_rate
        self._budget = SearchBudget(session, is_led=self._is_led)
        self._compiled = {key for _, key, _ in space.costly()}  # knobs with values that cost a compilation
        self._costly = [] if self._is_led else space.costly()
        self._hold: Knobs = {key: space.reference[key] for _, key, _ in self._costly}  # the costly knobs in cheap proposals
        self._distributions = space.distributions()
        free = {key: found for key, found in self._distributions.items() if key not in self._hold}
        self._single_changes = SingleChanges(space, list(free), session.host_context)
        self._num_free = len(free)
        num_known = len(session.records) - 1  # added to the seed, so that a resumed sampler does not repeat its proposals
        self._random = make_sampler("random", seed=config.study.seed + num_known + 1, distributions=free)
        sampler = make_sampler(self._sampler_name, seed=config.study.seed + num_known, distributions=free)
        self._rates = sampler if isinstance(sampler, RatesSampler) else None  # the only sampler with forecasts
        journal, name = session.folder.journal_file, session.folder.name
        inform(
            sampler,
            session,
            is_open=self._is_open,
            may_win=lambda knobs: not self._parity.barring(space.changed(knobs)),
            running=lambda: [self._searched(one.knobs) for one in self._settled.pending.values() if one.trial is None],
        )
        self._study = begin_study(journal, name, sampler, scores=self._score_names(), machine=machine_of(session))
        self._num_singles = 0
        # Trials to repeat: trials that were interrupted in earlier runs of the study. In a grid, also trials of this run that
        # were disturbed or interrupted, because the sampler proposes each point of a grid only once.
        self._unfinished: list[TrialRecord] = []
        self._is_too_dear = False
        self._is_listing = False  # whether the points of a small space are listed, because the sampler has missed some
        self._unaffordable: list[tuple[str, str, KnobValue]] = []  # see `_unaffordable_values`
        self._left_out: dict[ConfigurationKey, Knobs] = {}  # proposals of the sampler that did not fit the budget
        self._reason = ""
        self._load_trials(session.searched)

    def _score_names(self) -> list[str]:
        """Returns the names under which a viewer of Optuna's journal shows the scores. A higher score is always better."""
        rate = f"{self._session.baseline.unit} per second"
        return [rate if name == THROUGHPUT else f"score of {name}" for name in self._names]

    def _load_trials(self, records: list[TrialRecord]) -> None:
        """Loads the existing trials: the baseline and those of earlier runs of the study."""
        for record in records:
            self._settled.note(record)
            self._add_to_sampler(record)
            kind, _, key = record.origin.partition(" ")
            if kind == SINGLE:
                self._num_singles += 1
                self._single_changes.taken(key)
        for record in (record for record in records if record.outcome is Outcome.interrupted):
            settled = self._settled.own_trial(record.changed)
            if settled is None:
                self._unfinished.append(record)
            elif settled is record:
                self._session.listener.notice(
                    f"Not tried again: autotune was ended or a node was lost {MAX_CHANCES} times while the configuration of "
                    f"trial {record.number} ran."
                )
        if all(self._settled.is_measured(key, value) for _, key, value in self._costly):
            self._hold_best_costly_values()

    def run(self) -> str:
        """Searches and returns the reason why it ended.

        Raises:
            NothingWorked: the first configurations all failed in the same way, other than by running out of memory.
        """
        schedule = self._session.schedule
        try:
            self._interference.begin(self._session.baseline)
            for proposal in self._with_questions(self._proposals()):
                self._begin(proposal)
                self._make_room()
                self._budget.keep_for_finals(self._incumbent)
                self._settled.check_failures()
            schedule.stay_alone()
            self._announce_unaffordable_values()
        except (Ending, NothingWorked):
            schedule.drain()  # trials that still run count, too
            for proposal in self._settled.pending.values():
                self._forget(proposal)
            raise
        return self._budget.why_nothing_was_tried(self._reason) or self._reason

    def _open_slots(self) -> None:
        """Calibrates the slots if that is due, so that trials run in parallel from then on."""
        if self._budget.is_one_at_a_time:
            return
        schedule, num_before = self._session.schedule, self._session.schedule.num_slots
        self._interference.check(self._incumbent)
        if num_before == 1 and (most := self._budget.most_at_once) < schedule.num_slots:
            self._session.listener.notice(
                f"At first, {most} trials run at once, then as many as have finished, up to {schedule.num_slots}: "
                "each trial is chosen by what the finished ones showed."
            )

    def _make_room(self) -> None:
        """Waits until a slot is free and another trial may run."""
        schedule = self._session.schedule
        schedule.make_room()
        while schedule.num_running >= self._budget.most_at_once:
            schedule.wait_for_one()

    # Order -------------------------------------------------------------------------------------------------------

    def _proposals(self) -> Iterator[Proposal]:
        """Yields the proposals of the whole search, except questions about failures."""
        yield from self._fitting(self._again())
        if self._sampler_name != "grid":  # a grid visits these configurations anyway
            yield from self._fitting(earlier_seeds(self._session, self._hold, self._settled.is_known))
            seeds = expert_seeds(self._session, self._hold, self._may_fit, is_led=self._is_led, log_rates=self._log_rates)
            yield from self._fitting(seeds)
            if self._is_led:
                yield from self._fitting(filling_seed(self._session, self._incumbent, self._filling_batch))
        self._unaffordable = self._unaffordable_values()
        costly = [(key, value) for _, key, value in self._costly]
        if not any(record.origin == LATE for record in self._session.searched):
            yield from self._cheap(until=lambda: self._budget.is_time_for_late(self._incumbent, costly))
        if self._parity.is_possible:  # the wait for the best leaves slots idle, so it is made only if losses can be compared
            self._session.schedule.drain()
            self._compare_losses()
        if self._is_led:  # late proposals then only remove changes from the best, so they may begin later
            yield from self._cheap(until=lambda: self._budget.is_time_for_tiers(self._incumbent))
        if self._may_go_on():
            yield from self._fitting(self._late())
            if self._hold:
                self._session.schedule.drain()
                self._hold_best_costly_values()
            yield from self._cheap(until=lambda: False)
            if self._unfinished:
                yield from self._fitting(self._again())
                yield from self._cheap(until=lambda: False)

    def _with_questions(self, proposals: Iterator[Proposal]) -> Iterator[Proposal]:
        """Yields proposals and, after a failure, proposals that find out which change caused it.

        Such a proposal comes immediately, unless the suspected value costs a compilation. In that case, it waits until the
        sampler proposes this value, and replaces that proposal. Both take about as long and often gain as much.
        """
        yield from iter(self._question, None)
        for proposal in proposals:
            question = self._question(about=proposal.knobs) if proposal.trial else None
            if question:
                self._forget(proposal)
            yield question or proposal
            yield from iter(self._question, None)

    def _question(self, about: Knobs | None = None) -> Proposal | None:
        """Returns a proposal that shows whether a suspected change fails; None if there is none.

        Args:
            about: a configuration: only its changes that cost a compilation are considered. None: only changes that cost no
                compilation are considered.
        """
        if self._sampler_name == "grid" or not self._may_go_on():  # a grid visits every point anyway
            return None
        for key, knobs, why in self._culprits.questions(self._incumbent):
            is_costly = key in self._compiled
            is_wanted = not is_costly if about is None else is_costly and about.get(key) == knobs[key]
            if is_wanted and self._is_answerable(key, knobs):
                self._single_changes.taken(key)
                return Proposal(knobs=knobs, why=why, origin=f"{SINGLE} {key}")
        return None

    def _is_answerable(self, key: str, knobs: Knobs) -> bool:
        """Whether a trial of `knobs` is new, affordable, and would show whether its change of `key` fails.

        A trial that runs out of memory would not show it. Also False if a running trial already tests the same change, even in
        another configuration.
        """
        asking = (one.knobs for one in self._settled.pending.values() if one.origin == f"{SINGLE} {key}")
        if any(other.get(key) == knobs[key] for other in asking):
            return False
        return not self._settled.is_known(knobs) and self._budget.fits(knobs) and self._may_fit(knobs)

    def _compare_losses(self) -> None:
        """Compares the losses of the best so far with the baseline's. If they differ, does the same for the next best."""
        best = self._incumbent
        while self._may_go_on() and self._parity.is_open(self._incumbent):
            self._parity.check(self._incumbent)
        if self._incumbent is not best and self._rates:
            self._rates.reconsider()

    def _hold_best_costly_values(self) -> None:
        self._hold = {key: self._incumbent.knobs.get(key, value) for key, value in self._hold.items()}

    def _cheap(self, *, until: Callable[[], bool]) -> Iterator[Proposal]:
        """Yields cheap proposals until it is time for the next step, the budget ends, or there is nothing new."""
        while self._may_go_on() and not until():
            if proposal := self._new() or self._doubtful():
                yield proposal
            elif not self._session.schedule.wait_for_one():  # a trial that has just ended may lead to new proposals
                return

    def _fitting(self, proposals: Iterator[Proposal]) -> Iterator[Proposal]:
        """Yields the proposals that are new and fit the budget; notifies the user of those that do not fit."""
        for proposal in proposals:
            if not self._may_go_on():
                return
            proposal = self._culprits.mended(proposal)
            if self._settled.is_known(proposal.knobs):
                continue
            if self._budget.fits(proposal.knobs):
                yield proposal
            else:
                self._session.listener.notice(f"Not tried, because it does not fit the budget: {proposal.why}.")

    # Sources of proposals --------------------------------------------------------------------------------------------

    def _again(self) -> Iterator[Proposal]:
        """Yields the configurations in `_unfinished`, each once."""
        records, self._unfinished = self._unfinished, []
        for record in records:
            knobs = self._space.active({**self._space.reference, **record.changed})
            was = "disturbed" if record.outcome is Outcome.disturbed else "not finished"
            yield Proposal(knobs=knobs, why=f"again: trial {record.number} was {was}", origin=record.origin)

    def _unaffordable_values(self) -> list[tuple[str, str, KnobValue]]:
        """Returns the costly values that are expected not to fit the budget, so that RatesSampler cannot try them."""
        values, best = self._space.costly() if self._is_led else [], self._incumbent
        return [one for one in values if not self._budget.fits(self._space.active({**best.knobs, one[1]: one[2]}))]

    def _announce_unaffordable_values(self) -> None:
        """Notifies the user of those `_unaffordable` values that were not tried after all."""
        for why, key, value in self._unaffordable:
            if not self._settled.is_measured(key, value):
                self._session.listener.notice(f"Not tried, because it does not fit the budget: {why}.")

    def _filling_batch(self, knobs: Knobs, batches: list[int]) -> int | None:
        """Returns the largest of some batch sizes that is expected to fit into memory; None if unknown."""
        return self._rates.filling_batch(self._study, self._searched(knobs), batches) if self._rates else None

    def _may_fit(self, knobs: Knobs) -> bool:
        """Whether a configuration is expected to fit into memory; True if the sampler has no forecast."""
        return self._rates is None or self._rates.may_fit(self._study, self._searched(knobs))

    def _log_rates(self, some: list[Knobs]) -> list[float] | None:
        """Returns the expected rates of configurations, in logarithms; None without a forecast."""
        return self._rates.log_rates(self._study, [self._searched(knobs) for knobs in some]) if self._rates else None

    def _searched(self, knobs: Knobs) -> Knobs:
        return {key: value for key, value in knobs.items() if key in self._distributions}

    def _late(self) -> Iterator[Proposal]:
        """Yields the best so far: with each costly value, then without ineffective changes, then restricted to lower tiers."""
        self._wait_for_the_best()
        for why, key, value in self._costly:
            if not self._settled.is_measured(key, value):
                yield Proposal(knobs=self._space.active({**self._incumbent.knobs, key: value}), why=why, origin=LATE)
        if self._costly:
            self._session.schedule.drain()
        best = self._incumbent  # a configuration with a costly value may have become the best
        if self._sampler_name != "grid" and (trimmed := without_ineffective(self._session, best)):
            yield trimmed
        yield from of_lower_tiers(self._space, best)

    def _wait_for_the_best(self) -> None:
        """Waits until no trial runs, unless the running trials are too few to expect that one of them becomes the best."""
        schedule = self._session.schedule
        if schedule.num_running > FEW_FRAC * self._budget.num_searched:
            schedule.drain()

    def _doubtful(self) -> Proposal | None:
        """Returns the configuration to measure again once nothing new is left; see `RatesSampler.doubted`."""
        params = self._rates.doubted(self._study) if self._rates else None
        if params is None:
            return None
        knobs = self._space.active({**self._space.reference, **params})
        key = configuration_key(self._space.changed(knobs))
        own = [one for one in self._session.searched if configuration_key(one.changed) == key]
        first = next((one for one in own if one.score), None)
        is_begun = key in self._settled.pending or any(one.origin == AGAIN for one in own)
        if first is None or is_begun or not self._budget.fits(knobs):
            return None
        why = f"again: trial {first.number} was far slower than the other trials suggest"
        return Proposal(knobs=knobs, why=why, origin=AGAIN)

    def _new(self) -> Proposal | None:
        if self._num_free == 0:
            self._reason = EXHAUSTED
            return None
        if self._rates and self._rates.has_nothing_more:
            self._reason = NO_IMPROVEMENT
            if not self._knows_more():
                return None
            self._rates.ask_again()
        if self._budget.is_for_answer:
            self._reason = ANSWER_FIRST
            if not self._knows_more():
                return None
            self._budget.ask_again()
        return (self._single_change() if self._is_turn_of_single_change() else None) or self._sampled()

    def _knows_more(self) -> bool:
        """Whether the last proposal was based on assumed results of running trials, all of which have ended by now."""
        return self._rates is not None and self._rates.is_provisional and not self._session.schedule.num_running

    def _is_turn_of_single_change(self) -> bool:
        """Whether the next proposal is a single change rather than a proposal of TPE.

        The first proposals are single changes, one for each knob; after that, every other proposal is a single change. Single
        changes replace the random trials that TPE would start with. Random points in a space of ten knobs are mostly worse than
        the baseline, and a study of a slow program may have only fifteen trials.
        """
        is_starting = self._num_singles < self._num_free
        is_tpe = self._sampler_name == "tpe" or (self._sampler_name == "rates" and not self._is_led)
        return is_tpe and (is_starting or self._budget.num_begun % 2 == 0)

    def _single_change(self) -> Proposal | None:
        best = self._incumbent
        for key, knobs in self._single_changes.of(best):
            if not self._settled.is_known(knobs) and self._budget.fits(knobs):
                self._num_singles += 1
                self._single_changes.taken(key)
                why = f"{key}={knobs.get(key)} alone on the best so far (trial {best.number})"
                return Proposal(knobs=knobs, why=why, origin=f"{SINGLE} {key}")
        return None

    def _sampled(self) -> Proposal | None:
        """Returns the sampler's next proposal that is new and fits the budget; None if it has none."""
        is_grid = self._sampler_name == "grid"
        limit, limit_too_dear = (MAX_REPEATED_GRID_POINTS,) * 2 if is_grid else (MAX_REPEATED_PROPOSALS, MAX_TOO_DEAR)
        self._is_too_dear = False
        if self._is_listing and (missed := self._missed()):
            return missed
        num_known = num_too_dear = 0
        while num_known < limit and num_too_dear < limit_too_dear and not self._is_grid_done():
            trial, proposal = self._ask(is_random=num_known >= SAMPLER_GIVES_UP_AFTER)
            if self._rates and self._rates.is_exhausted:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
                break
            known = self._settled.known_as(proposal.knobs, self._space.changed(proposal.knobs))
            if known is not None:
                tell(self._study, trial, known, **self._limits())
                num_known += 1
            elif self._settled.is_known(proposal.knobs):  # its trial is running
                self._forget(proposal)
                num_known += 1
            elif not self._budget.fits(proposal.knobs):
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # not measured: may come again, except in a grid
                self._left_out[configuration_key(self._space.changed(proposal.knobs))] = proposal.knobs
                num_too_dear += 1
            else:
                return proposal
        if num_known >= limit and not is_grid and (missed := self._missed()):
            self._is_listing = True
            return missed
        is_risky = self._rates and self._rates.is_exhausted and self._rates.is_held_back
        why_none = TOO_RISKY if is_risky else EXHAUSTED
        is_left = any(not self._settled.is_known(knobs) for knobs in self._left_out.values())
        self._reason = self._budget.why_nothing_fits() if is_left or self._is_too_dear else why_none
        return None

    def _missed(self) -> Proposal | None:
        """Returns a point of `design.levels` that the sampler did not find and that needs a trial; None in a large space."""
        listed = {key: values for key, values in levels(self._space).items() if key not in self._hold}
        if math.prod(map(len, listed.values())) > MAX_LISTED:
            return None
        points = list(itertools.product(*listed.values()))
        random.Random(self._budget.num_begun).shuffle(points)
        for point in points:
            knobs = self._space.active({**self._space.reference, **dict(zip(listed, point, strict=True)), **self._hold})
            if self._is_open(knobs):
                return Proposal(knobs=knobs, why="one of the configurations that are left", origin=f"{SAMPLER} random")
        return None

    def _ask(self, *, is_random: bool) -> tuple[optuna.trial.Trial, Proposal]:
        own = self._study.sampler
        is_random = is_random and self._sampler_name != "grid"
        try:
            self._study.sampler = self._random if is_random else own
            trial = self._study.ask()
            knobs = self._space.suggest(trial, hold=self._hold)
        finally:
            self._study.sampler = own
        name = "random" if is_random else self._sampler_name
        why = f"proposed by the sampler ({name})"
        if not is_random and self._rates:
            proposed = self._rates.proposed(trial.number)
            why = proposed.why if proposed else why
            self._budget.weigh(self._incumbent, proposed.expected_improvement if proposed else None)
        return trial, Proposal(knobs=knobs, why=why, origin=f"{SAMPLER} {name}", trial=trial)

    # Results ---------------------------------------------------------------------------------------------------

    def _begin(self, proposal: Proposal) -> None:
        self._settled.pending[configuration_key(self._space.changed(proposal.knobs))] = proposal
        self._open_slots()  # only now: a resumed search may have nothing left to try
        take = functools.partial(self._take, proposal)
        self._session.begin(proposal.knobs, proposal.why, origin=proposal.origin, take=take)

    def _take(self, proposal: Proposal, record: TrialRecord) -> None:
        self._settled.pending.pop(configuration_key(record.changed), None)
        self._settled.note(record)
        if record.outcome.is_no_answer and self._sampler_name == "grid":
            self._unfinished.append(record)
        if proposal.trial is None:
            self._add_to_sampler(record)
        else:
            tell(self._study, proposal.trial, record, **self._limits())

    def _forget(self, proposal: Proposal) -> None:
        """Tells the sampler that a proposal was not measured, so that it may propose it again."""
        if proposal.trial is not None:
            self._study.tell(proposal.trial, state=optuna.trial.TrialState.FAIL)

    def _add_to_sampler(self, record: TrialRecord) -> None:
        add_known(self._study, record, self._distributions, **self._limits())

    def _limits(self) -> dict[str, Any]:
        session, num = self._session, len(self._names)
        limited = session.runner.goal.limited_metrics
        return {"worst": session.tally.worst(num), "memory_capacity_bytes": session.memory_capacity_bytes, "metrics": limited}

    def _is_open(self, knobs: Knobs) -> bool:
        """Whether a configuration is new and fits the remaining budget; sets `_is_too_dear` if it is new but does not fit."""
        if self._settled.is_known(knobs):
            return False
        if not self._budget.fits(knobs):
            self._is_too_dear = True
            return False
        return True

    def _is_grid_done(self) -> bool:
        sampler = self._study.sampler
        return isinstance(sampler, CompleteGrid) and sampler.is_exhausted(self._study)

    @property
    def _incumbent(self) -> TrialRecord:
        """The best trial so far. With several objectives, the best at one of them; the objectives take turns."""
        return self._session.tally.best(self._budget.num_searched % len(self._names)) or self._session.baseline

    def _may_go_on(self) -> bool:
        self._reason = self._budget.why_over()
        return not self._reason
