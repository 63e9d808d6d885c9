"""What a sampler of rates is given: what the study knows of configurations, and which of its parts it may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Params = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """What the sampler makes use of; each can be left out, to see what it buys."""

    decomposition: bool = True
    memory: bool = True
    cost: bool = True
    stop: bool = True


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the study knows of configurations besides their trials.

    Attributes:
        active: takes the knobs that have no effect with the others out of a configuration.
        is_open: whether a configuration is new and fits what is left of the budget.
        may_win: whether nothing was found against a configuration since it was measured.
        expected_s: what a trial of it costs, seconds.
        costly: knobs whose values cost a compilation, with the value that does not.
        favoured: values that an expert would start with.
    """

    active: Callable[[Params], Params] = lambda params: params
    is_open: Callable[[Params], bool] = lambda _: True
    may_win: Callable[[Params], bool] = lambda _: True
    expected_s: Callable[[Params], float] = lambda _: 1.0
    costly: Mapping[str, Any] = field(default_factory=dict)
    favoured: Mapping[str, Any] = field(default_factory=dict)
