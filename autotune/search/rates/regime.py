"""What rate a device rate D and a loader capacity L make together: with cores of their own, or on the same ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.search.rates.coding import Array

MOST_TIMES, LEAST_SURE = 20.0, 20.0  # how far above a rate its D is looked for, and how unsure it may be compared with the rate
# Of the rate, what is left where threads and workers take each other's cores: threads wait for one another, and a worker counts
# as busy while it waits for a core. Four programs on two cores: 0.5 to 0.85 with small operators, 1 with large ones.
CROWDED = 0.8
SHARPNESS = 8.0  # of the turn from loader-bound to device-bound: batch times vary, so that both wait a little where D = L


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the sampler knows of the machine; plain values, kept in the study's journal.

    Attributes:
        num_cores: effective cores of one process; None unknown.
        is_cpu: whether the step computes on them.
        memory_bytes: what a trial may fill; None unknown.
        workers: of the loader, where it is no knob that is searched.
        threads: of the step, the same; None for all cores.
    """

    num_cores: float | None = None
    is_cpu: bool = False
    memory_bytes: float | None = None
    workers: float = 0.0
    threads: float | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Machine:
        """Returns the machine that `vars` of one made; what is missing is unknown."""
        known = {one.name for one in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in known})


def combined(device: Array, loader: Array, *, workers: Array, threads: Array, machine: Machine) -> Array:
    """Returns the rates that D and L make together.

    Without workers step and loader take turns. With workers that have cores of their own the slower one decides. A worker that
    takes its core from a thread of the step stops all of the step, whose threads wait for each other after every operator: for
    such workers the two take turns again, 1/rate = 1/L + 1/D, and lose a little more.

    Args:
        device: D, samples per second with a free loader.
        loader: L, samples per second of the loader alone; infinite where there is none.
        workers: processes of the loader.
        threads: of the step, where it computes on the CPU.
        machine: how many cores there are, and whether the step computes on them.
    """
    in_turn = 1 / (1 / device + 1 / loader)
    overlapped = (device**-SHARPNESS + loader**-SHARPNESS) ** (-1 / SHARPNESS)
    if machine.num_cores is not None:
        sharing = shared_frac(workers, threads, machine)
        lost = CROWDED**sharing if machine.is_cpu else 1.0
        overlapped = np.minimum(overlapped, lost / (1 / loader + sharing / device))
    return np.where(workers > 0, overlapped, in_turn)


def shared_frac(workers: Array, threads: Array, machine: Machine) -> Array:
    """Returns the share of the loader's workers that have no core of their own beside the step's threads; 0 without workers."""
    busy = np.minimum(workers, machine.num_cores or np.inf)
    free = np.maximum(0.0, (machine.num_cores or np.inf) - (threads if machine.is_cpu else 1.0))
    return np.asarray(np.where(workers > 0, 1 - np.minimum(busy, free) / np.maximum(busy, 1.0), 0.0))


def device_rate(rate: Array, loader: Array, *, workers: Array, threads: Array, machine: Machine) -> tuple[Array, Array]:
    """Returns the D that makes a rate together with L, and by what factor it is less sure than the rate.

    Found by halving between the rate itself and far above it; where the loader alone decides any D would do, and the factor
    says so.
    """

    def together(device: Array) -> Array:
        return combined(device, loader, workers=workers, threads=threads, machine=machine)

    low, high = np.log(rate), np.log(rate) + np.log(MOST_TIMES)
    for _ in range(30):
        middle = (low + high) / 2
        is_above = together(np.exp(middle)) > rate
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    found = np.exp((low + high) / 2)
    slope = np.log(together(found * 1.01) / together(found / 1.01)) / np.log(1.01**2)
    return found, 1 / np.maximum(slope, 1 / LEAST_SURE)
