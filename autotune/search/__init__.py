"""Searches with Optuna: samplers, the results passed to them, and the journal."""

from autotune.search.rates import Machine, RatesSampler, Rules, SamplerOptions
from autotune.search.samplers import SAMPLERS, make_sampler
from autotune.search.study import add_known, begin_study, may_be_to_blame, scores_of, tell

__all__ = [
    "SAMPLERS",
    "Machine",
    "RatesSampler",
    "Rules",
    "SamplerOptions",
    "add_known",
    "begin_study",
    "make_sampler",
    "may_be_to_blame",
    "scores_of",
    "tell",
]
