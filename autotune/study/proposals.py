"""What is tried next: expert seeds, then single changes and the sampler, late the costly values. Never the same twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import optuna

from autotune.records import Knobs, KnobValue, TrialRecord
from autotune.search import add_known, make_sampler, open_study, tell
from autotune.study.session import Session, configuration_key

MAX_REPEATED_PROPOSALS = 40  # the sampler proposes what is known already this often in a row: the space is used up
SAMPLER_GIVES_UP_AFTER = 10  # from then on random ones: a sampler may insist on its favourite
MAX_REPEATED_GRID_POINTS = 5000  # grid points that differ only in knobs without meaning there
MAX_TOO_DEAR = 8  # proposals in a row that do not fit what is left of the budget
NUM_SAME_FAILURES = 6  # first trials that all fail alike, memory apart: more of the same teaches nothing
WAITING_FRAC = 0.2  # share of time waiting for input from which the loader is what binds
EXHAUSTED = "the search space is used up"
OUT_OF_TIME = "the budget is used"
OUT_OF_TRIALS = "the trial budget is used"
HOPELESS = "the first trials all failed for the same reason"


@dataclass(kw_only=True)
class Proposal:
    """A configuration to try.

    Attributes:
        knobs: full configuration.
        why: one line.
        trial: Optuna's trial when its sampler proposed it.
    """

    knobs: Knobs
    why: str
    trial: optuna.trial.Trial | None = None


class Search:
    """Proposes, measures and tells until time, trials or ideas run out."""

    def __init__(self, session: Session) -> None:
        config, space = session.plan.config, session.resolved
        self._session, self._space = session, space
        self._is_grid = config.search.sampler == "grid"
        self._costly = space.costly()
        self._hold: Knobs = {key: space.reference[key] for _, key, _ in self._costly}
        self._distributions = space.distributions()
        asked = {key: found for key, found in self._distributions.items() if key not in self._hold}
        self._num_asked = len(asked)
        sampler = make_sampler(config.search.sampler, seed=config.study.seed, distributions=asked)
        self._random = make_sampler("random", seed=config.study.seed + 1, distributions=asked)
        self._study = open_study(session.folder.journal_file, session.folder.name, sampler)
        self._known = {configuration_key(session.baseline.changed): session.baseline}
        self._teach(session.baseline)

    def run(self) -> str:
        """Searches and returns why it ended."""
        for proposal in self._proposals():
            record = self._measure(proposal)
            if self._is_hopeless():
                return HOPELESS
            assert record is not None
        return self._reason

    def _proposals(self) -> Iterator[Proposal]:
        self._reason = OUT_OF_TIME
        yield from self._fitting(self._seeds())
        is_costly_due = bool(self._costly)
        while self._may_go_on():
            if is_costly_due and self._session.budget.is_time_for_costly(self._num_searched, len(self._costly)):
                is_costly_due = False
                yield from self._fitting(self._costly_values())
                self._hold = {key: self._incumbent.knobs.get(key, value) for key, value in self._hold.items()}
                continue
            proposal = self._next()
            if proposal is not None:
                yield proposal
            elif is_costly_due:  # nothing else to try: no use in waiting for their time
                is_costly_due = False
                yield from self._fitting(self._costly_values())
            else:
                return

    def _fitting(self, proposals: Iterator[Proposal]) -> Iterator[Proposal]:
        """Yields the proposals that are new and fit the budget; says which do not."""
        for proposal in proposals:
            if not self._may_go_on():
                return
            if self._is_known(proposal.knobs):
                continue
            if self._fits(proposal.knobs):
                yield proposal
            else:
                self._session.listener.notice(f"Left out, it would not fit the budget: {proposal.why}.")

    def _seeds(self) -> Iterator[Proposal]:
        if self._is_grid or self._session.circumstances is None:
            return
        for why, knobs in self._space.seeds(self._session.circumstances):
            yield Proposal(knobs=self._space.active({**knobs, **self._hold}), why=why)

    def _costly_values(self) -> Iterator[Proposal]:
        best = self._incumbent
        for why, key, value in self._costly:
            yield Proposal(knobs=self._space.active({**best.knobs, key: value}), why=why)

    def _next(self) -> Proposal | None:
        """Returns the next proposal beside seeds and costly values; None when there is none, `_reason` says why."""
        if self._num_asked == 0:
            self._reason = EXHAUSTED
            return None
        if self._is_tpe_starting() and (single := self._single_change()):
            return single
        return self._asked()

    def _is_tpe_starting(self) -> bool:
        """Whether single changes go before the sampler: they stand in for the random trials it would start with.

        One change a knob on the best so far is what an expert does by hand; random points of a space of ten knobs are mostly
        worse than the baseline, and a study of a slow program has fifteen trials in all.
        """
        if self._session.plan.config.search.sampler != "tpe":
            return False
        return self._num_single < self._num_asked or self._num_searched % 2 == 0

    _num_single = 0

    def _single_change(self) -> Proposal | None:
        best = self._incumbent
        for key in self._keys_by_need(best):
            for value in self._neighbours(key, best):
                knobs = self._space.active({**self._space.reference, **best.knobs, key: value})
                if not self._is_known(knobs) and self._fits(knobs):
                    self._num_single += 1
                    self._tried_keys.append(key)
                    return Proposal(knobs=knobs, why=f"{key}={value} alone on the best so far (trial {best.number})")
        return None

    def _keys_by_need(self, best: TrialRecord) -> list[str]:
        """Returns the knobs to change, those tried least often first, then those on the side that binds."""
        if not hasattr(self, "_tried_keys"):
            self._tried_keys: list[str] = []
        is_waiting = (best.data_wait_frac or 0.0) > WAITING_FRAC
        keys = [key for key in self._space.domains if key not in self._hold]
        return sorted(keys, key=lambda key: (self._tried_keys.count(key), key.startswith("loader.") != is_waiting))

    def _neighbours(self, key: str, best: TrialRecord) -> list[KnobValue]:
        """Returns the values next to the best's own, the larger first; all others where there is no order."""
        values = list(self._space.domains[key].values)
        own = best.knobs.get(key, self._space.reference[key])
        if own not in values or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return [value for value in values if value != own]
        place = values.index(own)
        return [values[n] for n in (place + 1, place - 1) if 0 <= n < len(values)]

    def _asked(self) -> Proposal | None:
        limit = MAX_REPEATED_GRID_POINTS if self._is_grid else MAX_REPEATED_PROPOSALS
        repeated = too_dear = 0
        self._reason = EXHAUSTED
        while repeated < limit and too_dear < MAX_TOO_DEAR:
            sampler = self._study.sampler
            if isinstance(sampler, optuna.samplers.GridSampler) and sampler.is_exhausted(self._study):
                return None
            proposal = self._ask(is_random=repeated >= SAMPLER_GIVES_UP_AFTER and not self._is_grid)
            known = self._known.get(configuration_key(self._space.changed(proposal.knobs)))
            assert proposal.trial is not None
            if known is not None:
                tell(self._study, proposal.trial, known, **self._limits())
                repeated += 1
            elif not self._fits(proposal.knobs):
                self._study.tell(proposal.trial, state=optuna.trial.TrialState.FAIL)  # not measured: may come again
                too_dear += 1
            else:
                return proposal
        self._reason = OUT_OF_TIME if too_dear >= MAX_TOO_DEAR else EXHAUSTED
        return None

    def _ask(self, *, is_random: bool) -> Proposal:
        own = self._study.sampler
        try:
            self._study.sampler = self._random if is_random else own
            trial = self._study.ask()
            knobs = self._space.suggest(trial, hold=self._hold)
        finally:
            self._study.sampler = own
        name = "random" if is_random else self._session.plan.config.search.sampler
        return Proposal(knobs=knobs, why=f"proposed by the sampler ({name})", trial=trial)

    def _measure(self, proposal: Proposal) -> TrialRecord:
        asked = proposal.trial
        record = self._session.measure(proposal.knobs, proposal.why, sampler_number=asked.number if asked else None)
        self._known[configuration_key(record.changed)] = record
        if asked is None:
            self._teach(record)
        else:
            tell(self._study, asked, record, **self._limits())
        return record

    def _teach(self, record: TrialRecord) -> None:
        add_known(self._study, record, self._distributions, **self._limits())

    def _limits(self) -> dict[str, float | int | None]:
        values = [record.value for record in self._session.searched if record.value is not None]
        return {"worst": min(values), "memory_capacity_bytes": self._session.memory_capacity_bytes}

    def _is_known(self, knobs: Knobs) -> bool:
        return configuration_key(self._space.changed(knobs)) in self._known

    def _fits(self, knobs: Knobs) -> bool:
        expected_s = self._session.costs.expected_s(knobs, self._space.changed(knobs))
        return expected_s <= self._session.budget.search_left_s

    @property
    def _incumbent(self) -> TrialRecord:
        able = [record for record in self._session.searched if record.outcome.may_win]
        return max(able, key=lambda record: record.value or 0.0, default=self._session.baseline)

    @property
    def _num_searched(self) -> int:
        return len(self._session.searched) - 1

    def _may_go_on(self) -> bool:
        limit = self._session.budget.max_trials
        if limit is not None and self._num_searched >= limit:
            self._reason = OUT_OF_TRIALS
            return False
        self._reason = OUT_OF_TIME
        return self._session.budget.search_left_s > 0

    def _is_hopeless(self) -> bool:
        tried = [record.outcome for record in self._session.searched[1:]]
        same = len(tried) == NUM_SAME_FAILURES and len(set(tried)) == 1
        return same and not tried[0].has_value and "oom" not in tried[0]
