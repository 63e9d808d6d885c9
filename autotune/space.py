"""Defines the search space: domains that the user asked for, resolved for one machine and program, and sampled by Optuna."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from autotune.errors import BadInput
from autotune.knobs.base import HostContext, Knob
from autotune.knobs.catalogue import CATALOGUE, is_knob, knob
from autotune.knobs.loader import BATCH_SIZE
from autotune.knobs.step import ACCUMULATION, derived, dividing, tier_of
from autotune.knobs.values import value_of
from autotune.records import Knobs, KnobValue, Tier

if TYPE_CHECKING:  # Optuna costs half a second to import and only a running study needs it
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

# Knobs that have no effect with some values of other knobs.
DEPENDENT = [key for key, found in CATALOGUE.items() if found.is_active is not Knob.is_active]


@dataclass(frozen=True)
class Choice:
    """A domain that is a list of values. Optuna's samplers assume no order of the values and no distance between them."""

    values: tuple[KnobValue, ...]

    def contains(self, value: KnobValue) -> bool:
        """Whether `value` may be proposed. True and 1, which are equal in Python, are different values here."""
        return any(value == own and type(value) is type(own) for own in self.values)

    def including(self, value: KnobValue) -> Choice:
        """Returns the domain with `value` added; sorted in ascending order if all values are numbers."""
        return self if self.contains(value) else Choice(_ordered((*self.values, value)))

    def nearest(self, value: KnobValue) -> KnobValue | None:
        """Returns `value` if it may be proposed, else the closest number; None if `value` or the domain has no number."""
        if self.contains(value):
            return value
        numbers = [own for own in self.values if _is_number(own)]
        if not _is_number(value) or not numbers:
            return None
        return min(numbers, key=lambda own: abs(float(own) - float(value)))

    def as_json(self) -> dict[str, Any]:
        """Returns {"choice": [...]}."""
        return {"choice": list(self.values)}

    def distribution(self) -> BaseDistribution:
        """Returns the domain as a distribution of Optuna."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(list(self.values))

    def suggest(self, trial: Trial, key: str) -> KnobValue:
        """Asks the sampler for a value."""
        return cast(KnobValue, trial.suggest_categorical(key, list(self.values)))


@dataclass(frozen=True)
class IntInterval:
    """A domain of all whole numbers from `low` to `high`, both included. With `log`, proposals are even on a log scale."""

    low: int
    high: int
    log: bool = False

    @property
    def values(self) -> tuple[KnobValue, ...]:
        """The two ends of the interval, used where a list of values is needed."""
        return tuple(dict.fromkeys((self.low, self.high)))

    def contains(self, value: KnobValue) -> bool:
        """Whether `value` may be proposed."""
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def including(self, value: KnobValue) -> IntInterval | Choice:
        """Returns the interval extended to `value`, without `log` if it then reaches below 1; a Choice for a non-integer."""
        if self.contains(value):
            return self
        if not isinstance(value, int) or isinstance(value, bool):
            return Choice((self.low, self.high, value))
        low, high = min(self.low, value), max(self.high, value)
        return IntInterval(low, high, log=self.log and low >= 1)

    def nearest(self, value: KnobValue) -> KnobValue | None:
        """Returns the whole number of the interval closest to `value`; None if `value` is not a number."""
        return min(max(round(float(value)), self.low), self.high) if _is_number(value) else None

    def as_json(self) -> dict[str, Any]:
        """Returns {"interval": [low, high], "log": bool}."""
        return {"interval": [self.low, self.high], "log": self.log}

    def distribution(self) -> BaseDistribution:
        """Returns the domain as a distribution of Optuna."""
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high, log=self.log)

    def suggest(self, trial: Trial, key: str) -> KnobValue:
        """Asks the sampler for a value."""
        return trial.suggest_int(key, self.low, self.high, log=self.log)


Domain = Choice | IntInterval


def domain_from_json(raw: Any) -> Domain | None:
    """Returns the domain that `as_json` wrote; None for {"auto": true}, which stands for the domain that the knob chooses.

    Raises:
        ValueError: it is not a domain.
    """
    match raw:
        case {"auto": True}:
            return None
        case {"choice": [*values]} if values and all(isinstance(value, bool | int | float | str) for value in values):
            return Choice(tuple(values))
        case {"interval": [int(low), int(high)], "log": bool(is_log)}:
            return IntInterval(low, high, log=is_log)
    raise ValueError(f"not a domain, got {raw!r:.80}")


@dataclass(kw_only=True)
class SearchSpace:
    """The search space the user asked for, before machine and program are known.

    Attributes:
        domains: knob key -> domain; None asks for the domain that the knob chooses for the machine (`Knob.domain`, "auto").
        pinned: knobs fixed for every trial, including the baseline.
        tiers: highest tier that may be searched.
        is_held: whether every step processes `train.global_batch` samples; accumulation then follows from the batch size.
        left_out: knob key -> reason, for knobs of a named space that are not searched because the user named a knob that
            excludes them.
        typed: knobs that the user named one by one, not through a named space; empty when a study is resumed.
    """

    domains: dict[str, Domain | None] = field(default_factory=dict)
    pinned: Knobs = field(default_factory=dict)
    tiers: Tier = Tier.training
    is_held: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    typed: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(kw_only=True)
class ResolvedSpace:
    """The search space for this machine and this program.

    Attributes:
        domains: knob key -> domain, each with the baseline's value and at least one other value. Knobs that other knobs
            depend on come first.
        pinned: knobs fixed for every trial.
        baseline: full configuration of trial 0, without knobs that have no effect in it.
        dropped: knob key -> why it is not searched.
        reference: the baseline's values including inactive knobs; `changed` compares with these.
        held: required product of batch size and accumulation in every configuration, in samples; None if it is free.
    """

    domains: dict[str, Domain]
    pinned: Knobs
    baseline: Knobs
    dropped: dict[str, str]
    reference: Knobs
    held: int | None = None

    def suggest(self, trial: Trial, *, hold: Knobs | None = None) -> Knobs:
        """Returns a full configuration with the values in `hold`. The sampler proposes the value of every other active knob."""
        held = hold or {}
        knobs: Knobs = {**self.reference, **{key: value for key, value in held.items() if key in self.reference}}
        for key, domain in self.domains.items():
            if key not in held and knob(key).is_active(knobs):
                knobs[key] = domain.suggest(trial, key)
        return self.active(knobs)

    def active(self, knobs: Knobs) -> Knobs:
        """Returns `knobs` without the knobs that have no effect in this configuration, and with the derived accumulation."""
        return _active(derived(knobs, held=self.held) if self.held else knobs)

    def distributions(self) -> dict[str, BaseDistribution]:
        """Returns knob key -> Optuna distribution."""
        return {key: domain.distribution() for key, domain in self.domains.items()}

    def changed(self, knobs: Knobs) -> Knobs:
        """Returns the part of `knobs` that differs from the baseline, without derived knobs."""
        reference, without = self.reference, ACCUMULATION.key if self.held else None
        return {
            key: value
            for key, value in knobs.items()  # `is` is fast; this runs hundreds of times a trial
            if (own := reference.get(key)) is not value and not _same(value, own) and key != without
        }

    def tier(self, changed: Knobs) -> Tier:
        """Returns the highest tier among changed knobs; exact if nothing changed."""
        tiers = (tier_of(knob(key), is_held=self.held is not None) for key in changed)
        return max(tiers, key=lambda tier: tier.rank, default=Tier.exact)

    def costly(self) -> list[tuple[str, str, KnobValue]]:
        """Returns (why, key, value) for every value that costs a compilation, in the order of the domains' values."""
        return [
            (f"{key}={value} with the best of the other settings", key, value)
            for key, domain in self.domains.items()
            if knob(key).is_costly
            for value in domain.values
            if not _same(value, self.reference[key])
        ]

    def seeds(self, host_context: HostContext, *, kept: Collection[str] = ()) -> list[tuple[str, Knobs]]:
        """Returns the initial configurations, which an expert would try first, as (why, full configuration).

        There are at most five. The baseline is not among them.

        Args:
            host_context: the machine, and the program as the baseline trial found it.
            kept: knobs that an expert would leave as they are.
        """
        expert = {key: value for key, value in self.experts(host_context).items() if key not in kept}
        workers, batch = "loader.num_workers", "loader.batch_size"
        alone = {key: value for key, value in expert.items() if key != workers}
        if workers in self.domains and self.domains[workers].contains(0):
            alone[workers] = 0
        larger, largest = self._larger(batch, factor=4 if host_context.has_cuda else 2), self._larger(batch, factor=8)
        plans = [
            ("an expert's choice at the program's batch size", expert),
            ("an expert's choice at a larger batch", {**expert, **larger}),
            ("an expert's choice without loader workers, which would take cores from the step", alone),
            ("an expert's choice at a larger batch without loader workers", {**alone, **larger}),
            ("an expert's choice at a far larger batch", {**expert, **largest}),
        ]
        if not host_context.has_cuda:  # the step itself needs the cores, so variants without workers come first
            plans = [plans[2], plans[3], plans[0], plans[1], plans[4]]
        return self._distinct([(why, self.active({**self.reference, **plan})) for why, plan in plans])

    def experts(self, host_context: HostContext) -> Knobs:
        """Returns the value that an expert would choose for each knob, moved to the nearest value of the knob's domain."""
        wanted = {key: knob(key).expert(host_context) for key in self.domains}
        nearest = {key: self.domains[key].nearest(value) for key, value in wanted.items() if value is not None}
        return {key: value for key, value in nearest.items() if value is not None}

    def with_smaller_batch(self, knobs: Knobs) -> Knobs | None:
        """Returns `knobs` with the next batch size below the baseline's; None if there is none."""
        own = self.reference.get(BATCH_SIZE.key)
        values = self.domains[BATCH_SIZE.key].values if BATCH_SIZE.key in self.domains else ()
        smaller = [value for value in values if isinstance(value, int) and isinstance(own, int) and value < own]
        return self.active({**knobs, BATCH_SIZE.key: max(smaller)}) if smaller else None

    def _larger(self, key: str, *, factor: int) -> Knobs:
        """Returns {key: value}; {} if the domain has no value above the baseline's.

        The value is above the baseline's, and as near as possible to `factor` times the baseline's.
        """
        own = self.reference.get(key)
        if key not in self.domains or not isinstance(own, int):
            return {}
        value = self.domains[key].nearest(own * factor)
        if isinstance(value, int) and value > own:
            return {key: value}
        above = [one for one in self.domains[key].values if isinstance(one, int) and one > own]
        return {key: min(above)} if above else {}

    def _distinct(self, plans: list[tuple[str, Knobs]]) -> list[tuple[str, Knobs]]:
        """Returns the plans without repetitions and without the baseline."""
        kept: list[tuple[str, Knobs]] = []
        for why, knobs in plans:
            if knobs != self.baseline and all(knobs != other for _, other in kept):
                kept.append((why, knobs))
        return kept

    def as_json(self) -> dict[str, Any]:
        """Returns knob key -> domain as plain values."""
        return {key: domain.as_json() for key, domain in self.domains.items()}


def resolve(space: SearchSpace, host_context: HostContext, *, passed: Knobs) -> ResolvedSpace:
    """Resolves the space for one machine and one program.

    Args:
        space: what the user asked for.
        host_context: the machine, and the program as the baseline trial found it.
        passed: knob -> value in the baseline's command line, for the knobs that are arguments there.
    """
    reference, dropped, domains = _reference(space, host_context, passed), dict(space.left_out), {}
    # Values worth a trial lie around the program's own value: the observed value, or else the value in its command line.
    host_context = replace(host_context, observed={**passed, **host_context.observed})
    held = _held(space, reference)
    for key, asked in space.domains.items():
        found = knob(key)
        if reason := _why_not_searched(found, space, host_context, passed):
            dropped[key] = reason
            continue
        if held and key == BATCH_SIZE.key:
            asked = Choice(tuple(dividing(held, _batch_sizes_in(asked, held), host_context)))
        domain = (asked or Choice(_ordered(tuple(found.domain(host_context))))).including(reference[key])
        if len(domain.values) > 1:
            domains[key] = domain
        else:
            dropped[key] = f"only the baseline's own value ({reference[key]}) is worth trying here"
    for key in _never_active(domains, reference):
        del domains[key]
        dropped[key] = "has no effect with the values the other knobs can take"
    return ResolvedSpace(
        domains=_by_dependence(domains),
        pinned=dict(space.pinned),
        baseline=_active(reference),
        dropped=dropped,
        reference=reference,
        held=held,
    )


def _held(space: SearchSpace, reference: Knobs) -> int | None:
    """Returns the product of batch size and accumulation that all configurations must have, the baseline's; None if free."""
    batch = reference.get(BATCH_SIZE.key)
    if not space.is_held or not isinstance(batch, int):
        return None
    return batch * int(reference.get(ACCUMULATION.key, ACCUMULATION.default))


def _batch_sizes_in(asked: Domain | None, held: int) -> Iterable[KnobValue] | None:
    """Returns the batch sizes in a domain (of an interval, only those up to `held`); None if the knob chooses its domain."""
    if asked is None:
        return None
    return range(asked.low, min(asked.high, held) + 1) if isinstance(asked, IntInterval) else asked.values


def _why_not_searched(found: Knob, space: SearchSpace, host_context: HostContext, passed: Knobs) -> str | None:
    if found.key in space.pinned:
        return "pinned"
    tier = tier_of(found, is_held=space.is_held)
    if tier.rank > space.tiers.rank:
        return f"its tier is {tier}, but tiers={space.tiers} limits the search"
    if space.is_held and (reason := _reason_when_held(found, space, host_context)):
        return reason
    if reason := found.blocked(host_context):
        return reason
    return None if found.key in passed else host_context.not_applicable.get(found.key)


def _reason_when_held(found: Knob, space: SearchSpace, host_context: HostContext) -> str | None:
    if found.key == ACCUMULATION.key:
        return "derived from train.global_batch"
    if found.key != BATCH_SIZE.key:
        return None
    if reason := host_context.not_applicable.get(ACCUMULATION.key):
        return f"train.global_batch is set, and gradients cannot be accumulated: {reason}"
    return f"train.global_batch and {ACCUMULATION.key} leave only one value" if ACCUMULATION.key in space.pinned else None


def _reference(space: SearchSpace, host_context: HostContext, passed: Knobs) -> Knobs:
    """Returns the baseline's value of every known knob, by precedence: pinned, command line, observed, default."""
    observed = {key: _readable(key, value) for key, value in host_context.observed.items() if is_knob(key)}
    values = {key: knob(key).default for key in [*observed, *space.domains]}
    return {**values, **{key: value for key, value in observed.items() if value is not None}, **passed, **space.pinned}


def _readable(key: str, observed: Any) -> KnobValue | None:
    """Returns an observed value as the knob's own type, or unchanged if the knob does not accept it.

    Returns None for what cannot be a value: a loader without workers reports a prefetch_factor of None.
    """
    if not isinstance(observed, bool | int | float | str):
        return None
    try:
        return value_of(knob(key), observed)
    except BadInput:
        return observed


def _by_dependence(domains: dict[str, Domain]) -> dict[str, Domain]:
    """Returns the domains, sorted so that knobs which may be inactive are sampled after the knobs that they depend on."""
    settings = [{}, *({key: value} for key, domain in domains.items() for value in domain.values)]
    return dict(sorted(domains.items(), key=lambda item: not all(map(knob(item[0]).is_active, settings))))


def _never_active(domains: dict[str, Domain], reference: Knobs) -> list[str]:
    """Returns the keys of knobs that are inactive in the baseline and after every change of a single knob."""
    settings = [reference, *({**reference, key: value} for key, domain in domains.items() for value in domain.values)]
    return [key for key in domains if not any(knob(key).is_active(setting) for setting in settings)]


def _active(knobs: Knobs) -> Knobs:
    inactive = {key for key in DEPENDENT if key in knobs and not CATALOGUE[key].is_active(knobs)}
    return {key: value for key, value in knobs.items() if key not in inactive}


def _same(one: KnobValue, other: KnobValue | None) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_number(value: KnobValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ordered(values: tuple[KnobValue, ...]) -> tuple[KnobValue, ...]:
    """Returns the values in ascending order if all are numbers, otherwise in the given order."""
    return tuple(sorted(values, key=float)) if all(map(_is_number, values)) else values
