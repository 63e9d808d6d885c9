"""Computes what the models see of configurations: features, usual rates, and the number of processes.

D is the rate of the device if loading took no time, L the rate of the loader alone, both in samples per second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autotune.search.rates.coding import BATCH, Array, Codes, Coding, Features
from autotune.search.rates.regime import Machine, shared_frac

WORKERS, THREADS = "loader.num_workers", "threads.intra"
DEVICE, LOADER, ALL, REST = "device", "loader", "all", "rest"
# How much a knob may affect each side, device and loader: 1 for the side that it belongs to, ELSEWHERE for the other side.
# Loader knobs belong to the loader, all others to the device. ON_BOTH lists exceptions: knob -> (device, loader).
LOADER_PREFIX, ELSEWHERE = "loader.", 0.15
ON_BOTH = {BATCH: (1.0, 0.3), THREADS: (1.0, 0.5), "loader.pin_memory": (0.5, 0.5), "loader.own_cores": (0.5, 1.0)}
# Usual spreads, as in `model.USUAL`, of the residual: the part of the log rate that D and L do not explain. If they were 0,
# neighbours of the best would be dropped too soon.
REST_USUAL = (0.08, 0.05, 0.03)
# Prior spread of the logarithm of the share that `regime.CROWDED` estimates: shares of 0.5 to 1 were observed.
CROWDING_SPREAD = 0.3
THREADS_TREND = 0.7  # on a CPU, D grows with the threads to this power, up to the cores
BATCH_TREND, HALF_BATCH = 0.5, 32.0  # D grows with the batch b, which amortises a step's fixed cost: (b/(b + half))**trend
NUM_KEPT = 4  # number of arrays of configurations whose results are kept
T = TypeVar("T")


class Views:
    """What the models see of configurations.

    Several forecasts share one object. It keeps results for the last few arrays of configurations, by the array's identity.

    Args:
        coding: the levels of the knobs.
        machine: cores, and whether the step computes on them.
        gains: {knob: {value: its usual gain}}, as the logarithm of a ratio of rates.
        spreads: {knob: usual spread of its gains}, relative to model.USUAL; 1 for knobs that are not listed.
    """

    def __init__(
        self,
        coding: Coding,
        machine: Machine,
        gains: Mapping[str, Mapping[Any, float]] | None = None,
        spreads: Mapping[str, float] | None = None,
    ) -> None:
        self.machine, self._coding, self._gains = machine, coding, gains or {}
        self._weights = {
            side: {knob.key: scale(knob.key, side) * (spreads or {}).get(knob.key, 1.0) for knob in coding.knobs}
            for side in (DEVICE, LOADER, ALL)
        }
        self._latest: dict[str, deque[tuple[Codes, Any]]] = {}

    def features(self, side: str, codes: Codes) -> Features:
        """Returns the features for the model of a side, or of the residual (REST), with one more column for shared cores."""
        return self._once(side, codes, lambda: self._features(side, codes))

    def usual_device(self, codes: Codes) -> Array:
        """Returns the prior expectation of log D, up to a constant."""
        return self._once("usual device", codes, lambda: self._usual_device(codes))

    def usual_loader(self, codes: Codes) -> Array:
        """Returns the prior expectation of log L: L grows with the workers, up to the cores."""
        return self._once("usual loader", codes, lambda: self._usual_loader(codes))

    def processes(self, codes: Codes) -> tuple[Array, Array]:
        """Returns the number of the loader's workers and of the step's threads in each configuration."""
        return self._once("processes", codes, lambda: self._processes(codes))

    def are_shared(self, codes: Codes) -> NDArray[np.bool_]:
        """Returns, for each configuration, whether step and loader compute on the same cores."""
        return np.asarray(shared_frac(*self.processes(codes), self.machine) > 0) & self.machine.is_cpu

    def _once(self, name: str, codes: Codes, made: Callable[[], T]) -> T:
        kept = self._latest.setdefault(name, deque(maxlen=NUM_KEPT))
        for known, value in kept:
            if known is codes:
                return value  # type: ignore[no-any-return]
        value = made()
        kept.append((codes, value))
        return value

    def _features(self, side: str, codes: Codes) -> Features:
        plain = self._once("plain", codes, lambda: self._coding.features(codes))
        features = self._coding.weighted(plain, self._weights[ALL if side == REST else side])
        if side != REST or not self.machine.is_cpu or self.machine.num_cores is None:
            return features
        crowding = shared_frac(*self.processes(codes), self.machine) * CROWDING_SPREAD
        return features.with_effect(crowding / REST_USUAL[0])

    def _usual_device(self, codes: Codes) -> Array:
        batch = np.maximum(self._coding.numbers(BATCH, codes, otherwise=1.0), 1.0)
        usual = BATCH_TREND * np.log(batch / (batch + HALF_BATCH)) + self._gain(DEVICE, codes)
        if self.machine.is_cpu and self.machine.num_cores:
            _, threads = self.processes(codes)
            usual += THREADS_TREND * np.log(np.minimum(threads, self.machine.num_cores))
        return np.asarray(usual)

    def _usual_loader(self, codes: Codes) -> Array:
        workers, _ = self.processes(codes)
        most = max(1.0, self.machine.num_cores or np.inf)
        return np.asarray(np.log(np.clip(workers, 1.0, most)) + self._gain(LOADER, codes))

    def _gain(self, side: str, codes: Codes) -> Array:
        """Returns the usual gain of each configuration's values on a side, in logarithms."""
        found = np.zeros(len(codes))
        for key, values in self._gains.items():
            for value, gain in values.items():
                found += gain * scale(key, side) * self._coding.has(key, value, codes)
        return found

    def _processes(self, codes: Codes) -> tuple[Array, Array]:
        machine = self.machine
        workers = self._coding.numbers(WORKERS, codes, otherwise=machine.workers)
        return workers, self._coding.numbers(THREADS, codes, otherwise=machine.threads or machine.num_cores or 1.0)


def scale(key: str, side: str) -> float:
    """Returns how much a knob may affect a side: DEVICE, LOADER, or ALL for both."""
    if side == ALL:
        return 1.0
    of_device, of_loader = ON_BOTH.get(key, (ELSEWHERE, 1.0) if key.startswith(LOADER_PREFIX) else (1.0, ELSEWHERE))
    return of_device if side == DEVICE else of_loader
