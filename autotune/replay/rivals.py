"""Implements rival strategies, to compare the study's own search with. Each has the interface of `proposals.Search`."""

from __future__ import annotations

import abc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import optuna

from autotune.records import Knobs, KnobValue, TrialRecord
from autotune.search import add_known, begin_study, tell
from autotune.study.design import levels
from autotune.trials.configurations import ConfigurationKey, configuration_key
from autotune.trials.session import Session

MAX_REPEATED = 200  # if the sampler proposes this many known configurations in a row, the space counts as used up
EXHAUSTED, OUT_OF_BUDGET = "the search space is used up", "the budget is used"
# The order in which `Ladder` tries knobs one by one. All other knobs come last.
LADDER = (
    "loader.num_workers", "precision.amp", "layout.channels_last", "threads.intra", "loader.prefetch_factor",
    "loader.batch_size", "backend.cudnn_benchmark", "loader.pin_memory", "optimizer.implementation",
    "loader.persistent_workers",
)  # fmt: skip
BATCH, COMPILE = "loader.batch_size", "compile.mode"

Proposal = tuple[Knobs, optuna.trial.Trial | None]


class Rival(abc.ABC):
    """A search that measures each configuration from `proposals` once, until the budget is used."""

    def __init__(self, session: Session) -> None:
        self.session, self.space = session, session.resolved
        self.seed = session.inputs.config.study.seed
        self._known = {configuration_key(record.changed): record for record in session.searched}

    @abc.abstractmethod
    def proposals(self) -> Iterator[Proposal]:
        """Yields full configurations, each with Optuna's trial if a sampler of Optuna proposed it."""

    def run(self) -> str:
        """Searches, and returns why the search ended."""
        for knobs, trial in self.proposals():
            if self.known(knobs):
                continue
            if not self._may_go_on():
                return OUT_OF_BUDGET
            record = self.session.measure(knobs, "replay", origin="replay")
            self._known[self._key(knobs)] = record
            self.learn(record, trial)
        return EXHAUSTED

    def learn(self, record: TrialRecord, trial: optuna.trial.Trial | None) -> None:  # noqa: B027  (most rivals do not learn)
        """Learns from a measured proposal."""

    def known(self, knobs: Knobs) -> TrialRecord | None:
        """Returns the trial that has measured a configuration; None if there is none."""
        return self._known.get(self._key(knobs))

    @property
    def best(self) -> TrialRecord:
        """The best trial so far; the baseline if none may win."""
        able = [record for record in self.session.searched if record.outcome.may_win and record.score is not None]
        return max(able, key=lambda record: record.score or 0.0, default=self.session.baseline)

    def seeds(self) -> list[Knobs]:
        """Returns the expert's initial configurations, the same as in the study's own search."""
        here = self.session.host_context
        return [knobs for _, knobs in self.space.seeds(here)] if here else []

    def shuffled(self) -> list[Knobs]:
        """Returns every configuration in a random order that depends on the seed."""
        everything = self.everything()
        random.Random(f"rival {self.seed}").shuffle(everything)
        return everything

    def everything(self) -> list[Knobs]:
        """Returns every configuration in the order of the grid, where the last knob varies fastest."""
        listed, found = levels(self.space), dict[ConfigurationKey, Knobs]()
        for point in itertools.product(*listed.values()):
            knobs = self.space.active({**self.space.reference, **dict(zip(listed, point, strict=True))})
            found.setdefault(self._key(knobs), knobs)
        return list(found.values())

    def _key(self, knobs: Knobs) -> ConfigurationKey:
        return configuration_key(self.space.changed(knobs))

    def _may_go_on(self) -> bool:
        budget, num = self.session.budget, self.session.num_searched
        return (budget.max_trials is None or num < budget.max_trials) and budget.search_left_s > 0


class RandomOrder(Rival):
    """A search that tries every configuration in a random order: the simplest strategy."""

    def proposals(self) -> Iterator[Proposal]:
        """Yields every configuration."""
        yield from ((knobs, None) for knobs in self.shuffled())


class GridOrder(Rival):
    """A search that tries every configuration in the order of the grid."""

    def proposals(self) -> Iterator[Proposal]:
        """Yields every configuration."""
        yield from ((knobs, None) for knobs in self.everything())


class Ladder(Rival):
    """A search like an expert's: favourite settings at growing batch sizes, then compilation, then one knob after another."""

    def proposals(self) -> Iterator[Proposal]:
        """Yields the configurations of each step, then all other configurations in random order."""
        here = self.session.host_context
        expert = {**self.space.reference, **(self.space.experts(here) if here else {})}
        for batch in self._growing():
            knobs = self.space.active({**expert, **batch})
            yield knobs, None
            record = self.known(knobs)
            if record and record.outcome.is_memory:
                break
        yield from self._one_by_one([COMPILE])
        keys = [key for key in LADDER if key in self.space.domains]
        keys += [key for key in self.space.domains if key not in (*keys, COMPILE)]
        before = None
        while before != self.best.number:  # until trying all knobs once brings no gain
            before = self.best.number
            yield from self._one_by_one(keys)
        yield from ((knobs, None) for knobs in self.shuffled())

    def _one_by_one(self, keys: list[str]) -> Iterator[Proposal]:
        for key in keys:
            for value in levels(self.space).get(key, []):
                yield self.space.active({**self.space.reference, **self.best.knobs, key: value}), None

    def _growing(self) -> list[dict[str, KnobValue]]:
        """Returns the batch sizes from the program's own upwards, each as {knob: size}."""
        own = self.space.reference.get(BATCH)
        sizes = [size for size in levels(self.space).get(BATCH, []) if isinstance(size, int) and isinstance(own, int)]
        return [{BATCH: size} for size in sorted(sizes) if isinstance(own, int) and size >= own] or [{}]


class Sampled(Rival):
    """A search with one of Optuna's samplers. It begins with the baseline and, optionally, the expert's configurations.

    Args:
        session: the study.
        make: returns the sampler for a seed.
        has_seeds: whether the expert's initial configurations come first.
        patience: how many known configurations the sampler may propose in a row before a random configuration is tried; None
            for no limit.
    """

    def __init__(
        self,
        session: Session,
        make: Callable[[int], optuna.samplers.BaseSampler],
        *,
        has_seeds: bool = False,
        patience: int | None = None,
    ) -> None:
        super().__init__(session)
        self._distributions = self.space.distributions()
        self._study = begin_study(session.folder.journal_file, session.folder.name, make(self.seed))
        self._has_seeds, self._patience = has_seeds, patience
        for record in session.searched:
            self.learn(record, None)

    def proposals(self) -> Iterator[Proposal]:
        """Yields the sampler's new proposals. For a known configuration, the sampler gets the earlier result instead."""
        if self._has_seeds:
            yield from ((knobs, None) for knobs in self.seeds())
        num_known, at_random = 0, iter(self.shuffled())
        while num_known < MAX_REPEATED:
            if num_known == self._patience:
                drawn = next((knobs for knobs in at_random if not self.known(knobs)), None)
                if drawn is None:
                    return
                num_known = 0
                yield drawn, None
            trial = self._study.ask()
            knobs = self.space.suggest(trial)
            if record := self.known(knobs):
                tell(self._study, trial, record, **self._limits())
                num_known += 1
            else:
                num_known = 0
                yield knobs, trial

    def learn(self, record: TrialRecord, trial: optuna.trial.Trial | None) -> None:
        """Passes a measurement on to the sampler."""
        if trial is None:
            add_known(self._study, record, self._distributions, **self._limits())
        else:
            tell(self._study, trial, record, **self._limits())

    def _limits(self) -> dict[str, Any]:
        known = [record.score for record in self.session.searched if record.score is not None]
        return {"worst": [min(known, default=0.0)], "memory_capacity_bytes": self.session.memory_capacity_bytes}
