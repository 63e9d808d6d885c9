"""Combines a device rate D and a loader capacity L into a rate, with separate or shared cores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.search.rates.coding import Array

# The largest D that is considered is MOST_TIMES times the rate. D counts as at most LEAST_SURE times as uncertain as the rate.
MOST_TIMES, LEAST_SURE = 20.0, 20.0
# If threads and workers compete for cores, threads wait for one another, and only this share of the rate remains. Measured
# with four programs on two cores: 0.5 to 0.85 with small operators, 1 with large ones.
CROWDED = 0.8
SHARPNESS = 8.0  # sharpness of the transition from loader-bound to device-bound: near D = L, step and loader both wait a little


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about the machine for the sampler: plain values, stored in the study's journal.

    Attributes:
        num_cores: effective cores of one process; None when unknown.
        is_cpu: whether the step computes on the cores.
        memory_bytes: memory a trial may fill; None when unknown.
        workers: number of loader workers, if not searched.
        threads: number of the step's threads, if not searched; None for all cores.
    """

    num_cores: float | None = None
    is_cpu: bool = False
    memory_bytes: float | None = None
    workers: float = 0.0
    threads: float | None = None


def combined(device: Array, loader: Array, *, workers: Array, threads: Array, machine: Machine, waiting: float = 1.0) -> Array:
    """Returns the rates that result from D and L.

    Without workers, step and loader take turns. With workers on separate cores, the slower of the two limits the rate. If a
    worker takes a core from one of the step's threads, the cost depends on the operators and the scheduler. At one extreme, the
    threads wait for each other after every operator, so the worker stalls the whole step. Then step and loader take turns, too:
    1/rate = 1/L + 1/D, with a small additional loss. At the other extreme, no thread waits. Then all cores are busy, and the
    rate depends only on how many core-seconds a sample needs.

    Args:
        device: D, samples per second with a loader that costs nothing.
        loader: L, samples per second of the loader alone; infinite without a loader.
        workers: number of loader processes.
        threads: number of the step's threads, if it computes on the CPU.
        machine: number of cores, and whether the step computes on them.
        waiting: share of the step that is delayed when a worker takes a core from one of its threads: 1 if the whole step waits
            for that thread, 0 if no other thread waits.
    """
    in_turn = 1 / (1 / device + 1 / loader)
    overlapped = (device**-SHARPNESS + loader**-SHARPNESS) ** (-1 / SHARPNESS)
    if machine.num_cores is not None:
        sharing = shared_frac(workers, threads, machine)
        lost = CROWDED**sharing if machine.is_cpu else 1.0
        stalled = np.minimum(overlapped, lost / (1 / loader + sharing / device))
        busy = threads / machine.num_cores / device + np.minimum(workers / machine.num_cores, 1.0) / loader
        unstalled = np.maximum(stalled, np.minimum(overlapped, 1 / busy)) if machine.is_cpu else stalled
        overlapped = stalled**waiting * unstalled ** (1 - waiting)
    return np.where(workers > 0, overlapped, in_turn)


def shared_frac(workers: Array, threads: Array, machine: Machine) -> Array:
    """Returns the share of the loader's workers that must take cores from the step; 0 without workers."""
    busy = np.minimum(workers, machine.num_cores or np.inf)
    free = np.maximum(0.0, (machine.num_cores or np.inf) - (threads if machine.is_cpu else 1.0))
    return np.asarray(np.where(workers > 0, 1 - np.minimum(busy, free) / np.maximum(busy, 1.0), 0.0))


def device_rate(
    rate: Array, loader: Array, *, workers: Array, threads: Array, machine: Machine, waiting: float = 1.0
) -> tuple[Array, Array]:
    """Returns the D that explains a rate, given L and `waiting`, and the factor by which D is less certain than the rate.

    D is found by bisection between the rate itself and MOST_TIMES times the rate. If the loader alone limits the rate, any
    large D explains it, and the factor is large.
    """

    def together(device: Array) -> Array:
        return combined(device, loader, workers=workers, threads=threads, machine=machine, waiting=waiting)

    low, high = np.log(rate), np.log(rate) + np.log(MOST_TIMES)
    for _ in range(30):
        middle = (low + high) / 2
        is_above = together(np.exp(middle)) > rate
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    found = np.exp((low + high) / 2)
    slope = np.log(together(found * 1.01) / together(found / 1.01)) / np.log(1.01**2)
    return found, 1 / np.maximum(slope, 1 / LEAST_SURE)
