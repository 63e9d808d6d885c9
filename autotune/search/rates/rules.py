"""Defines the inputs of the rates sampler: facts about configurations, and which parts to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Params = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """Parts of the sampler (see `schema.SearchOptions`). Each can be switched off to measure its contribution."""

    decomposition: bool = True
    memory: bool = True
    cost: bool = True
    stop: bool = True


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Facts that the study knows about configurations, in addition to their trials.

    Attributes:
        active: removes inactive knobs from a configuration.
        is_open: whether a configuration is new and fits the rest of the budget.
        may_win: whether a measured configuration may still win; False if it was ruled out later.
        expected_s: expected seconds of a trial.
        costly: {knob: its value that needs no compilation}, for each knob with values that need one.
        gains: {knob: {value: its usual gain}}, as logarithm of a ratio of rates; 0 for values that are not listed.
        spreads: {knob: usual spread of its gains}, relative to `model.USUAL`; 1 for knobs that are not listed.
        ladders: {knob: (its values, its `Levelled.step`)}. The values are in an order such as (off, default, maximum),
            where each strengthens the effect of the one before.
        limits: {metric: largest value that a configuration may have}; memory is not among them.
        is_held: whether every configuration trains on `train.global_batch` samples per step. If so, the number of accumulated
            batches follows from the batch size.
        running: returns the configurations of running trials that the sampler did not propose. The study's journal, from which
            the sampler learns of trials, lists such trials only once they have ended.
    """

    active: Callable[[Params], Params] = lambda params: params
    is_open: Callable[[Params], bool] = lambda _: True
    may_win: Callable[[Params], bool] = lambda _: True
    expected_s: Callable[[Params], float] = lambda _: 1.0
    costly: Mapping[str, Any] = field(default_factory=dict)
    gains: Mapping[str, Mapping[Any, float]] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)
    ladders: Mapping[str, tuple[tuple[Any, ...], float]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    is_held: bool = False
    running: Callable[[], Sequence[Params]] = tuple
