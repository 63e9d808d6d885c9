"""Judges whether the machine disturbed a trial: what invalidates its rate, and what is only noted.

Disturbances are external causes that slow a trial down: other programs on its cores or its device, a hypervisor that gives
the cores away, a device that is too hot or throttled from outside. Other causes are only noted: a power cap (the trial's own
draw), throttling by a cgroup quota (its own use), pressure (the trial's own threads wait for each other as well), the kernel's
threads (they write back and decrypt for the trial), and the page cache.

Even a little foreign work is too much, since the threads of a step spin while they wait for the slowest. A program of two
threads on two cores ran at 1.00 of its speed with 0.05 cores of foreign work, at 0.98 with 0.1, at 0.88 with 0.2, and at 0.11
with 1.1. An idle machine showed 0.01 to 0.04 cores of foreign work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autotune.harness.protocol import RankResult
from autotune.monitors.cpu import CpuUse, describe
from autotune.quantities import bytes_text, number_text
from autotune.records import Kind, Outcome, TrialRecord

MOSTLY_FRAC = 0.5  # if a larger share of the bytes read came from disk, the trial did not read from memory
# Rate of a configuration's fastest repeat divided by that of its slowest; 18 of 272 recorded configurations, with three repeats
# each, reach it.
DRIFT_FACTOR = 1.5
MIN_WINDOW_S = 1.0  # CPU time is counted in hundredths of a second; shorter windows are too imprecise
# Limits beyond which something is a disturbance. Other programs on the CPU disturb a trial only if it lacked cores.
FOREIGN_CORES = 0.1  # cores that other programs use; with more, a step waits for them
FOREIGN_FRAC = 0.01  # the same as a share of the machine's cores, if that is more: a large machine is never quite idle
WAITING_CORES = 0.1  # mean number of the trial's threads that waited for a core; with fewer, no program took its cores
ROOM_CORES, ROOM_FRAC = 1.0, 0.25  # if this many cores and this share of all cores were idle, no program took its cores
STEAL_CORES = 0.1  # cores that the hypervisor gave to others
SLOWDOWN_FRAC = 0.001  # share of the window under thermal or brake slowdown, by NVML's counters
MIN_CLOCK_FRAC = 0.75  # minimum mean clock of the multiprocessors, as a share of their default clock
DEVICE_FRAC = 0.05  # share of the device's multiprocessors that another process uses
NUM_STUCK = 4  # disturbed attempts in a row, two per trial, after which the machine is accepted as it is
DISTURBANCES, MEASURED, ACCEPTED, PAGE_CACHE = "disturbances", "measured", "accepted_level", "page_cache"  # evidence keys
OWN_SHARE = "own_share"  # another evidence key: CPU time that autotune used during the trial, in words
CPU, STEAL, DEVICE, THERMAL, BRAKE, CLOCK = "cpu", "steal", "device", "thermal", "power_brake", "clock"


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """One external cause that slowed a trial down.

    Attributes:
        kind: CPU, STEAL, DEVICE, THERMAL, BRAKE or CLOCK.
        amount: cores for CPU and STEAL, otherwise a share.
        limit: the largest amount that is tolerated.
        words: description: "other programs used 1.9 of 2 cores (python hog.py, pid 4242: 1.9)".
    """

    kind: str
    amount: float
    limit: float
    words: str


def of_cpu(use: CpuUse | None, *, is_trial_running: bool = True) -> list[Disturbance]:
    """Returns disturbances of the CPU.

    Args:
        use: CPU use in the window, or in a moment without a trial; None when unknown.
        is_trial_running: whether a trial was running. If not, all foreign use counts, since it would be taken from a trial.
    """
    if use is None or use.seconds < MIN_WINDOW_S:
        return []
    found = []
    limit = max(FOREIGN_CORES, FOREIGN_FRAC * use.num_cores)
    if use.foreign_cores is not None and use.foreign_cores > limit and (_lacked_cores(use) or not is_trial_running):
        words = f"other programs used {use.foreign_cores:.2g} of {_of(use)}{_named(use)}"
        found.append(Disturbance(kind=CPU, amount=use.foreign_cores, limit=limit, words=words))
    if use.steal_cores is not None and use.steal_cores > STEAL_CORES:
        words = f"the hypervisor gave {use.steal_cores:.2g} of {_of(use)} to others (steal)"
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


class Level:
    """The disturbance that a study accepts beyond the limits: none, unless the machine never gets quiet.

    A machine that is never quiet must not make the tool useless. A disturbance that lasts through both attempts of the
    baseline, or of two later trials in a row, is accepted: from then on a trial counts as disturbed only if the disturbance
    gets worse. Search rates from before and after that moment are not comparable. The finals' rates are, since their
    configurations take turns. On a fully loaded machine no increase is visible, so only the turns and the ratio's
    interval protect the comparison.

    Attributes:
        amounts: {kind: accepted amount}.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self.amounts: dict[str, float] = {}
        self._num_in_a_row = 0
        for record in records:
            self.amounts |= {kind: float(amount) for kind, amount in record.evidence.get(ACCEPTED, {}).items()}

    def beyond(self, found: Sequence[Disturbance]) -> list[Disturbance]:
        """Returns the disturbances that exceed the accepted amounts."""
        return [one for one in found if one.amount > self.amounts.get(one.kind, 0.0) + one.limit]

    def note(self, outcome: Outcome) -> None:
        """Counts disturbed attempts in a row; failed attempts, which say nothing about the machine, neither count nor reset."""
        if outcome is Outcome.disturbed:
            self._num_in_a_row += 1
        elif outcome.has_value:
            self._num_in_a_row = 0

    def is_stuck(self, kind: Kind) -> bool:
        """Whether it is pointless to keep waiting for a quiet machine, after a disturbed trial of this kind."""
        return kind is Kind.baseline or self._num_in_a_row >= NUM_STUCK

    def accept(self, record: TrialRecord) -> str:
        """Accepts a trial's disturbances, restores its measurement, and returns a notice."""
        found = record.evidence[DISTURBANCES]
        self.amounts |= {one["kind"]: max(one["amount"], self.amounts.get(one["kind"], 0.0)) for one in found}
        self._num_in_a_row = 0
        measured = record.evidence.pop(MEASURED)
        record.outcome, record.value = Outcome(measured["outcome"]), measured["value"]
        record.ci = None if measured["ci"] is None else (measured["ci"][0], measured["ci"][1])
        record.evidence[ACCEPTED] = dict(self.amounts)
        words = "; ".join(one["words"] for one in found)
        record.reason = "; ".join(part for part in (measured["reason"], f"measured all the same: {words}") if part)
        return (
            f"This machine does not get quiet: {words}. The study goes on all the same, and counts a trial as disturbed "
            "only if this gets worse. Its finals take turns, so the comparison stays fair; "
            "the rates are lower than on a quiet machine."
        )


def page_cache(use: CpuUse | None, results: Sequence[RankResult], memory_bytes: int) -> str:
    """Returns why a long run may read data more slowly than the trial, which read from the page cache; "" for no reason.

    A short trial reads the same files as the trials before it, so it may find in memory what a whole epoch will not.

    Args:
        use: CPU use in the window, with the bytes read meanwhile; reads through mapped files are not counted.
        results: the ranks' results.
        memory_bytes: memory of the machine.
    """
    loader = (results[0].detected.get("loader") or {}) if results else {}
    samples = sum(result.window.samples for result in results if result.window)
    if use is None or not use.read_bytes or use.disk_bytes is None or not samples or not loader.get("num_samples"):
        return ""
    data_bytes = use.read_bytes / samples * loader["num_samples"]
    if data_bytes <= memory_bytes or use.disk_bytes > MOSTLY_FRAC * use.read_bytes:
        return ""
    return (
        f"if no sample is read twice, an epoch reads about {bytes_text(data_bytes)}, more than the memory holds "
        f"({bytes_text(memory_bytes)}); the trial read from memory, so an epoch may wait for the disk"
    )


def disturb(record: TrialRecord, beyond: Sequence[Disturbance]) -> None:
    """Sets a trial's outcome to `disturbed`; keeps what it measured as evidence."""
    measured = {"outcome": str(record.outcome), "reason": record.reason, "value": record.value, "ci": record.ci}
    record.evidence[MEASURED] = measured
    record.outcome, record.reason = Outcome.disturbed, "; ".join(one.words for one in beyond)
    record.value = record.ci = None


def own_share(use: CpuUse | None) -> str:
    """Returns a sentence if autotune itself took CPU time from a trial short of cores; "" if it did not, or if unknown.

    This time is reported but is no disturbance, because it slows all compared trials alike.
    """
    if use is None or use.seconds < MIN_WINDOW_S or (use.tuner_cores or 0.0) <= FOREIGN_CORES or not _lacked_cores(use):
        return ""
    return f"autotune itself used {use.tuner_cores:.2g} of {_of(use)}, for which the trial waited: give the study one more core"


def shared(records: Iterable[TrialRecord]) -> str:
    """Returns the latest `own_share` sentence of some trials, with the numbers of all that have one; "" if none has."""
    affected = [(record.number, words) for record in records if (words := record.evidence.get(OWN_SHARE))]
    if not affected:
        return ""
    numbers = ", ".join(str(number) for number, _ in affected)
    return f"{affected[-1][1]} (trial{'s' if len(affected) > 1 else ''} {numbers})"


def note(record: TrialRecord, found: Sequence[Disturbance]) -> None:
    """Writes disturbances into a trial's evidence, whether accepted or not."""
    if found:
        record.evidence[DISTURBANCES] = [asdict(one) for one in found]


def caveat(records: Iterable[TrialRecord]) -> dict[str, Any] | None:
    """Returns the disturbance that the study accepted, {"since_trial", "level", "words"}; None for a quiet machine."""
    accepted = [record for record in records if record.evidence.get(ACCEPTED)]
    if not accepted:
        return None
    last = accepted[-1]
    words = "; ".join(one["words"] for one in last.evidence.get(DISTURBANCES, []))
    return {"since_trial": accepted[0].number, "level": last.evidence[ACCEPTED], "words": words}


def drift(records: Sequence[TrialRecord]) -> str:
    """Returns a sentence on how far the baseline's measurements lie apart if that is more than noise, "" otherwise.

    The finals compare only measurements of the same round, so their ratio does not show this. Nor do the finals' rounds alone
    show it: they may agree by chance, or conditions may have changed since the search. So the baseline's first measurement
    counts as well.

    Args:
        records: trials, by number.
    """
    again = [record for record in records if record.number and record.repeats == 0 and record.kind is not Kind.parity]
    rates = [record.value for record in [*records[:1], *again] if record.value and record.outcome.may_win]
    if len(rates) < 2 or rates[0] != records[0].value or max(rates) < DRIFT_FACTOR * min(rates):
        return ""
    rest = f"{number_text(min(rates[1:]))} to {number_text(max(rates[1:]))}" if len(rates) > 2 else number_text(rates[-1])
    return (
        f"the unchanged program ran at {number_text(rates[0])} {records[0].unit}/s first and at {rest} when measured again: "
        "these rates do not repeat; the ratio compares only runs that took turns"
    )


def _lacked_cores(use: CpuUse) -> bool:
    """Whether the trial had fewer cores than it could have used: hardly any were idle, and its threads had to wait."""
    foreign_cores = use.foreign_cores or 0.0
    idle_cores = use.idle_cores if use.idle_cores is not None else use.num_cores - use.own_cores - foreign_cores
    if idle_cores >= max(ROOM_CORES, ROOM_FRAC * use.num_cores):
        return False
    return use.waiting_cores is None or use.waiting_cores > WAITING_CORES


def _of(use: CpuUse) -> str:
    """Returns the number of cores that were watched, in words."""
    cores = f"{use.num_cores:g} core{'' if use.num_cores == 1 else 's'}"
    return f"the {cores} that the trial may use" if use.is_part else cores


def _named(use: CpuUse) -> str:
    if not use.culprits:
        return " (by processes that have ended or cannot be seen)"
    anywhere = " on all cores" if use.is_part else ""
    return f" ({'; '.join(f'{describe(pid)}: {cores:.2g}{anywhere}' for pid, cores in use.culprits)})"
