"""Whether the machine left a trial alone: what of all that was seen changes the number, and what is only noted.

Judged is what takes speed from a trial without being its own doing: other programs on its cores or its device, a hypervisor
that gives the cores away, a device that is too hot or held down from outside. Only noted are a power cap (the trial's own
draw), throttling by a quota (the trial's own use), pressure (own threads wait for each other as well), the kernel's threads
(they write back and decrypt for the trial), the page cache.

Why so little foreign work is too much (measured, two cores, a program of two threads that uses both): beside 0.05 cores of
foreign work it ran at 1.00 of its speed, beside 0.1 at 0.98, 0.2 at 0.88, and beside 1.1 at 0.11: the threads of a step wait
for the last one, spinning. A machine at rest showed 0.01 to 0.04.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autotune.harness.protocol import RankResult
from autotune.monitors.cpu import CpuUse, describe
from autotune.quantities import bytes_text, number_text
from autotune.records import Kind, Outcome, TrialRecord

MOSTLY_FRAC = 0.5  # of what was read
DRIFT_FACTOR = 1.5  # between measurements of one configuration: three repeats of 272 recorded ones lay as far apart in 18
MIN_WINDOW_S = 1.0  # processor time is counted in hundredths of a second: shorter windows tell nothing
FOREIGN_CORES = 0.1  # used by others on a machine without room for them; above it a step waits for them
FOREIGN_FRAC = 0.01  # of the machine's cores, when that is more: a large machine is never quite at rest
WAITING_CORES = 0.1  # of the trial's threads that were ready to run and had no core: below it the others had cores of their own
ROOM_CORES, ROOM_FRAC = 1.0, 0.25  # idle, and as a share of all: the same, with threads so many that a little waiting adds up
STEAL_CORES = 0.1  # given to others by the hypervisor
SLOWDOWN_FRAC = 0.001  # of the window under thermal or brake slowdown, by NVML's counters
MIN_CLOCK_FRAC = 0.75  # of the default clock of the multiprocessors
DEVICE_FRAC = 0.05  # of the device's multiprocessors, used by another process
NUM_STUCK = 4  # attempts in a row that were disturbed, two of each trial: the machine is like that now
DISTURBANCES, MEASURED, ACCEPTED, PAGE_CACHE = "disturbances", "measured", "accepted_level", "page_cache"  # in the evidence
OWN_SHARE = "own_share"  # there as well: what autotune used during the trial, in words
CPU, STEAL, DEVICE, THERMAL, BRAKE, CLOCK = "cpu", "steal", "device", "thermal", "power_brake", "clock"


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """One thing that took speed from a trial.

    Attributes:
        kind: CPU, STEAL, DEVICE, THERMAL, BRAKE or CLOCK.
        amount: cores for CPU and STEAL, else a share.
        limit: what would have been borne.
        words: what it was: "other programs used 1.9 of 2 cores (python hog.py, pid 4242: 1.9)".
    """

    kind: str
    amount: float
    limit: float
    words: str


def of_cpu(use: CpuUse | None, *, is_trial_running: bool = True) -> list[Disturbance]:
    """Returns what took the processor away.

    Args:
        use: of the processor in the window, or in a moment without a trial; None unknown.
        is_trial_running: whether there was one: without, all others use is what they would take from it.
    """
    if use is None or use.seconds < MIN_WINDOW_S:
        return []
    found = []
    limit = max(FOREIGN_CORES, FOREIGN_FRAC * use.num_cores)
    if use.foreign_cores is not None and use.foreign_cores > limit and (_was_in_want(use) or not is_trial_running):
        words = f"other programs used {use.foreign_cores:.2g} of {_of(use)}{_named(use)}"
        found.append(Disturbance(kind=CPU, amount=use.foreign_cores, limit=limit, words=words))
    if use.steal_cores is not None and use.steal_cores > STEAL_CORES:
        words = f"the hypervisor gave {use.steal_cores:.2g} of {_of(use)} to others (steal)"
        found.append(Disturbance(kind=STEAL, amount=use.steal_cores, limit=STEAL_CORES, words=words))
    return found


def of_device(metrics: Mapping[str, float], strangers: Mapping[int, float | None]) -> list[Disturbance]:
    """Returns what took the device away.

    Args:
        metrics: `DeviceMonitor.metrics` of the window.
        strangers: other processes that computed on the device -> share of it; None when that is not known, and then only
            those that were not there when the study began.
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
    """How much disturbance this study bears, beyond the limits: none, until the machine turns out never to be quiet.

    A machine that is never quiet must not make the tool useless. What stays through both attempts of the baseline, or of
    two later trials in a row, is how the machine is now: from then on a trial is disturbed when it gets worse than that. Rates
    of the search before and after cannot be compared; the finals take turns and can. On a machine that is full nothing can get
    worse to be seen: there only the turns and their interval protect.

    Attributes:
        amounts: kind -> amount that is borne.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self.amounts: dict[str, float] = {}
        self._num_in_a_row = 0
        for record in records:
            self.amounts |= {kind: float(amount) for kind, amount in record.evidence.get(ACCEPTED, {}).items()}

    def beyond(self, found: Sequence[Disturbance]) -> list[Disturbance]:
        """Returns those that are worse than what is borne."""
        return [one for one in found if one.amount > self.amounts.get(one.kind, 0.0) + one.limit]

    def note(self, outcome: Outcome) -> None:
        """Keeps count of attempts that were disturbed; those that say nothing of the machine do not count."""
        if outcome is Outcome.disturbed:
            self._num_in_a_row += 1
        elif outcome.has_value:
            self._num_in_a_row = 0

    def is_stuck(self, kind: Kind) -> bool:
        """Whether waiting for a quiet machine is of no use, after a trial of this kind that was disturbed to the end."""
        return kind is Kind.baseline or self._num_in_a_row >= NUM_STUCK

    def accept(self, record: TrialRecord) -> str:
        """Takes the disturbances of a trial as how the machine is, gives the trial its number back, and returns the news."""
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
            f"This machine does not get quiet: {words}. The study goes on beside that, and takes a trial as disturbed when it "
            "gets worse. Its finals take turns, so the comparison stays fair; the rates are lower than on a quiet machine."
        )


def page_cache(use: CpuUse | None, results: Sequence[RankResult], memory_bytes: int) -> str:
    """Returns why a long run may read slower than the trial did, which read from memory; "" for no reason.

    A short trial reads what the ones before it have read, so it may find in memory what a whole epoch will not.

    Args:
        use: of the processor in the window, with what was read meanwhile; reads through mapped files are not counted.
        results: by rank.
        memory_bytes: of the machine.
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
    """Makes a trial's outcome `disturbed`; what it measured is kept as evidence."""
    measured = {"outcome": str(record.outcome), "reason": record.reason, "value": record.value, "ci": record.ci}
    record.evidence[MEASURED] = measured
    record.outcome, record.reason = Outcome.disturbed, "; ".join(one.words for one in beyond)
    record.value = record.ci = None


def own_share(use: CpuUse | None) -> str:
    """Returns that autotune itself took a core from a trial that had too few, in words; "" when it did not or it is not known.

    It is told and not judged: the next trial would have the same, and so would any that it is compared with.
    """
    if use is None or use.seconds < MIN_WINDOW_S or (use.tuner_cores or 0.0) <= FOREIGN_CORES or not _was_in_want(use):
        return ""
    return f"autotune itself used {use.tuner_cores:.2g} of {_of(use)}, for which the trial waited: give them one core more"


def shared(records: Iterable[TrialRecord]) -> str:
    """Returns what autotune took from the trials that are compared with each other, the last of them; "" for nothing."""
    told = [(record.number, words) for record in records if (words := record.evidence.get(OWN_SHARE))]
    if not told:
        return ""
    numbers = ", ".join(str(number) for number, _ in told)
    return f"{told[-1][1]} (trial{'s' if len(told) > 1 else ''} {numbers})"


def note(record: TrialRecord, found: Sequence[Disturbance]) -> None:
    """Writes what was found into a trial's evidence, borne or not."""
    if found:
        record.evidence[DISTURBANCES] = [asdict(one) for one in found]


def caveat(records: Iterable[TrialRecord]) -> dict[str, Any] | None:
    """Returns what the study was measured beside, {"since_trial", "level", "words"}; None for a machine that was quiet."""
    accepted = [record for record in records if record.evidence.get(ACCEPTED)]
    if not accepted:
        return None
    last = accepted[-1]
    words = "; ".join(one["words"] for one in last.evidence.get(DISTURBANCES, []))
    return {"since_trial": accepted[0].number, "level": last.evidence[ACCEPTED], "words": words}


def drift(records: Sequence[TrialRecord]) -> str:
    """Returns a sentence on how far the baseline's measurements lie apart where that is more than noise, "" otherwise.

    The finals compare rounds with each other only; but two rounds may agree by chance, and what holds in them is not what held
    before.

    Args:
        records: by number.
    """
    again = [record for record in records if record.number and record.repeats == 0 and record.kind is not Kind.parity]
    rates = [record.value for record in [*records[:1], *again] if record.value and record.outcome.may_win]
    if len(rates) < 2 or rates[0] != records[0].value or max(rates) < DRIFT_FACTOR * min(rates):
        return ""
    rest = f"{number_text(min(rates[1:]))} to {number_text(max(rates[1:]))}" if len(rates) > 2 else number_text(rates[-1])
    return (
        f"the program as it is ran at {number_text(rates[0])} {records[0].unit}/s first and at {rest} when measured again: "
        "these rates do not repeat, and the ratio is that of the runs made in turn"
    )


def _was_in_want(use: CpuUse) -> bool:
    """Whether the trial had fewer cores than it could have used: its own threads are no reason, beside strangers they count."""
    foreign_cores = use.foreign_cores or 0.0
    idle_cores = use.idle_cores if use.idle_cores is not None else use.num_cores - use.own_cores - foreign_cores
    if idle_cores >= max(ROOM_CORES, ROOM_FRAC * use.num_cores):
        return False
    return use.waiting_cores is None or use.waiting_cores > WAITING_CORES


def _of(use: CpuUse) -> str:
    """Returns the cores that were judged, in words."""
    cores = f"{use.num_cores:g} core{'' if use.num_cores == 1 else 's'}"
    return f"the {cores} that the trial may use" if use.is_part else cores


def _named(use: CpuUse) -> str:
    if not use.culprits:
        return " (by processes that have ended or cannot be seen)"
    anywhere = " on all cores" if use.is_part else ""
    return f" ({'; '.join(f'{describe(pid)}: {cores:.2g}{anywhere}' for pid, cores in use.culprits)})"
