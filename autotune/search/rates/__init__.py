"""Provides a sampler that predicts training rates from separate models of the device, the loader and the memory."""

from autotune.search.rates.failure_model import FailureModel, Proven
from autotune.search.rates.history import MEASURED
from autotune.search.rates.regime import Machine
from autotune.search.rates.rules import Rules, SamplerOptions
from autotune.search.rates.sampler import MACHINE, RatesSampler
from autotune.search.rates.step import Proposed

__all__ = ["MACHINE", "MEASURED", "FailureModel", "Machine", "Proposed", "Proven", "RatesSampler", "Rules", "SamplerOptions"]
