"""Finds what disturbs a trial: external causes that slow it down, and so invalidate its rate.

Disturbances are: other programs on the trial's cores or device, a hypervisor that gives the cores to other guests, and a
device that is too hot or throttled from outside. A slowdown in which the trial itself has a part is not a disturbance: a power
cap (it limits the trial's power draw), a cgroup quota (it limits the trial's CPU time), pressure (the trial's threads also wait
for each other), and work of the kernel's threads (they write back and decrypt the trial's files).

Even a little foreign work is too much, since the threads of a step spin while they wait for the slowest of them. A program of
two threads on two cores ran at 1.00 of its speed with 0.05 cores of foreign work, at 0.98 with 0.1, at 0.88 with 0.2, and at
0.11 with 1.1. An idle machine showed 0.01 to 0.04 cores of foreign work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.monitors.cpu import CpuUse, describe

MIN_WINDOW_S = 1.0  # CPU time is counted in hundredths of a second; shorter windows are too imprecise
# Limits beyond which something is a disturbance. Other programs on the CPU disturb a trial only if the trial lacked cores.
FOREIGN_CORES = 0.1  # cores that other programs may use; if they use more, they delay a step
FOREIGN_FRAC = 0.01  # as a share of all cores. The larger of both limits counts, because a large machine is never quite idle
WAITING_CORES = 0.1  # mean number of the trial's threads that waited for a core; up to this, the trial had enough cores
ROOM_CORES, ROOM_FRAC = 1.0, 0.25  # if this many cores and this share of all were idle, no program took the trial's cores
STEAL_CORES = 0.1  # cores that the hypervisor may give to others
SLOWDOWN_FRAC = 0.001  # share of the window that a slowdown by heat or power brake may last, by NVML's counters
MIN_CLOCK_FRAC = 0.75  # minimum mean clock of the multiprocessors, as a share of their default clock
DEVICE_FRAC = 0.05  # share of the device's multiprocessors that other processes may use
CPU, STEAL, DEVICE, THERMAL, BRAKE, CLOCK = "cpu", "steal", "device", "thermal", "power_brake", "clock"


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """One external cause that slowed a trial down.

    Attributes:
        kind: CPU, STEAL, DEVICE, THERMAL, BRAKE or CLOCK.
        amount: cores for CPU and STEAL; otherwise a share, for CLOCK the share of the clock that was missing.
        limit: the largest amount that is tolerated.
        words: description: "other programs used 1.9 of 2 cores (python hog.py, pid 4242: 1.9)".
    """

    kind: str
    amount: float
    limit: float
    words: str


def foreign_limit(num_cores: float) -> float:
    """Returns how many cores other programs may use on a machine with this many cores."""
    return max(FOREIGN_CORES, FOREIGN_FRAC * num_cores)


def of_cpu(use: CpuUse | None, *, is_trial_running: bool = True) -> list[Disturbance]:
    """Returns disturbances of the CPU.

    Args:
        use: CPU use in the window, or in a moment without a trial; None if unknown.
        is_trial_running: whether a trial was running. If not, foreign use counts even beside idle cores, since a trial may need
            all cores.
    """
    if use is None or use.seconds < MIN_WINDOW_S:
        return []
    found = []
    limit = foreign_limit(use.num_cores)
    if use.foreign_cores is not None and use.foreign_cores > limit and (_lacked_cores(use) or not is_trial_running):
        words = f"other programs used {use.foreign_cores:.2g} of {_cores(use)}{_culprits(use)}"
        found.append(Disturbance(kind=CPU, amount=use.foreign_cores, limit=limit, words=words))
    if use.steal_cores is not None and use.steal_cores > STEAL_CORES:
        words = f"the hypervisor gave {use.steal_cores:.2g} of {_cores(use)} to others (steal)"
        found.append(Disturbance(kind=STEAL, amount=use.steal_cores, limit=STEAL_CORES, words=words))
    return found


def of_device(metrics: Mapping[str, float], strangers: Mapping[int, float | None]) -> list[Disturbance]:
    """Returns disturbances of the device.

    Args:
        metrics: `DeviceMonitor.metrics` of the window.
        strangers: {foreign process that computed on the device: its share of the device, or None if unknown}. A process with an
            unknown share is listed only if it was not there when the study began.
    """
    found = []
    for kind, cause in ((THERMAL, "it was too hot"), (BRAKE, "the power supply held it back")):
        held_frac = metrics.get(f"gpu.slowdown_{kind}_frac", 0.0)
        if held_frac > SLOWDOWN_FRAC:
            words = f"the device lowered its clocks for {held_frac:.1%} of the window: {cause}"
            found.append(Disturbance(kind=kind, amount=held_frac, limit=SLOWDOWN_FRAC, words=words))
    clock_frac = metrics.get("gpu.sm_clock_frac")
    if clock_frac is not None and clock_frac < MIN_CLOCK_FRAC:
        words = f"the device ran at {clock_frac:.0%} of its default clock"
        found.append(Disturbance(kind=CLOCK, amount=1 - clock_frac, limit=1 - MIN_CLOCK_FRAC, words=words))
    used = {pid: 1.0 if share is None else share for pid, share in strangers.items()}
    if used and (share := sum(used.values())) > DEVICE_FRAC:
        names = ", ".join(describe(pid) for pid in sorted(used, key=lambda pid: -used[pid])[:3])
        found.append(Disturbance(kind=DEVICE, amount=share, limit=DEVICE_FRAC, words=f"others used the device ({names})"))
    return found


def own_share(use: CpuUse | None) -> str:
    """Returns a sentence if autotune itself took CPU time from a trial that lacked cores; "" if it did not, or if unknown.

    This time is reported but is not a disturbance, because it slows all compared trials alike.
    """
    if use is None or use.seconds < MIN_WINDOW_S or (use.tuner_cores or 0.0) <= FOREIGN_CORES or not _lacked_cores(use):
        return ""
    cores = f"{use.tuner_cores:.2g} of {_cores(use)}"
    return f"autotune itself used {cores}, for which the trial waited: give the study one more core"


def _lacked_cores(use: CpuUse) -> bool:
    """Whether the trial had fewer cores than it could have used: hardly any were idle, and its threads had to wait."""
    foreign_cores = use.foreign_cores or 0.0
    idle_cores = use.idle_cores if use.idle_cores is not None else use.num_cores - use.own_cores - foreign_cores
    if idle_cores >= max(ROOM_CORES, ROOM_FRAC * use.num_cores):
        return False
    return use.waiting_cores is None or use.waiting_cores > WAITING_CORES


def _cores(use: CpuUse) -> str:
    """Returns the number of cores that were watched, in words."""
    cores = f"{use.num_cores:g} core{'' if use.num_cores == 1 else 's'}"
    return f"the {cores} that the trial may use" if use.is_part else cores


def _culprits(use: CpuUse) -> str:
    if not use.culprits:
        return " (by processes that have ended or cannot be seen)"
    anywhere = " on all cores" if use.is_part else ""
    return f" ({'; '.join(f'{describe(pid)}: {cores:.2g}{anywhere}' for pid, cores in use.culprits)})"
