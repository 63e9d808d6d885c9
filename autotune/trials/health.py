"""Decides whether a disturbance invalidates a trial, and notes other reasons to mistrust a rate, such as cached data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from autotune.harness.protocol import RankResult
from autotune.monitors.cpu import CpuUse
from autotune.monitors.disturbances import Disturbance
from autotune.quantities import bytes_text, number_text
from autotune.records import Kind, Outcome, TrialRecord

MOSTLY_FRAC = 0.5  # if a larger share of the bytes read came from disk, the trial did not read from memory
# The baseline's rates have drifted if its fastest repeat is at least this many times as fast as its slowest. Of 272 recorded
# configurations with three repeats each, 18 reach this ratio.
DRIFT_FACTOR = 1.5
# After this many disturbed attempts in a row, two per trial, the machine is accepted as it is. Attempts that ran at the same
# time count once, because a single burst of load may disturb them all.
NUM_STUCK = 4
DISTURBANCES, MEASURED, ACCEPTED, PAGE_CACHE = "disturbances", "measured", "accepted_level", "page_cache"  # evidence keys
OWN_SHARE = "own_share"  # another evidence key: CPU time that autotune used during the trial, in words


class Level:
    """How much disturbance a study accepts in addition to the usual limits: none, unless the machine never gets quiet.

    autotune must also work on a machine that is never quiet. So a disturbance that lasts through both attempts of the baseline,
    or of two later trials in a row, is accepted. From then on, a trial counts as disturbed only if the disturbance gets worse.
    Search rates from before and after that moment are not comparable. The rates of the finals are comparable, because they are
    measured alternately, configuration by configuration. If the machine is fully loaded, a growing disturbance is not visible.
    Then only this alternation and the ratio's interval protect the comparison.

    Attributes:
        amounts: {kind: accepted amount}.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self.amounts: dict[str, float] = {}
        self._num_in_a_row, self._counted_until_s = 0, -math.inf
        for record in records:
            self.amounts |= {kind: float(amount) for kind, amount in record.evidence.get(ACCEPTED, {}).items()}

    def beyond(self, found: Sequence[Disturbance]) -> list[Disturbance]:
        """Returns the disturbances that exceed the accepted amount of their kind by more than the usual limit of that kind."""
        return [one for one in found if one.amount > self.amounts.get(one.kind, 0.0) + one.limit]

    def note(self, outcome: Outcome, *, began_s: float, ended_s: float) -> None:
        """Counts disturbed attempts in a row. A failed attempt is ignored, because it says nothing about the machine.

        Args:
            outcome: the attempt's outcome.
            began_s: when the attempt began, on the study's clock. An attempt that began before the last counted attempt had
                ended is not counted.
            ended_s: when the attempt ended.
        """
        if outcome is Outcome.disturbed and began_s >= self._counted_until_s:
            self._num_in_a_row += 1
            self._counted_until_s = ended_s
        elif outcome.has_value:
            self._num_in_a_row = 0

    def is_stuck(self, kind: Kind) -> bool:
        """Whether the study gives up waiting for a quiet machine after a disturbed trial of this kind."""
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
        record.reason = "; ".join(part for part in (measured["reason"], f"measured nevertheless: {words}") if part)
        return (
            f"The disturbance on this machine does not end: {words}. The study continues, and counts a trial as disturbed only "
            "if the disturbance gets worse. The finals measure the configurations side by side, so the comparison stays fair. "
            "The rates are lower than on a quiet machine."
        )


def page_cache(use: CpuUse | None, results: Sequence[RankResult], memory_bytes: int) -> str:
    """Returns why a long run may read its data more slowly than the trial did; "" if there is no reason.

    A short trial reads the same files as the trials before it. So its data may be in memory (the page cache), although the data
    of a whole epoch do not fit into memory.

    Args:
        use: CPU use in the window, and the bytes read in the window; reads through mapped files are not counted.
        results: the ranks' results.
        memory_bytes: memory of the machine.
    """
    loader = (results[0].detected.get("loader") or {}) if results else {}
    # Steps or tokens cannot be compared with the number of samples in the data set.
    samples = sum(result.window.samples for result in results if result.window and result.unit == "samples")
    if use is None or not use.read_bytes or use.disk_bytes is None or not samples or not loader.get("num_samples"):
        return ""
    data_bytes = use.read_bytes / samples * loader["num_samples"]
    if data_bytes <= memory_bytes or use.disk_bytes > MOSTLY_FRAC * use.read_bytes:
        return ""
    return (
        f"the trial read its data from memory; an epoch that reads each sample once reads about {bytes_text(data_bytes)}, more "
        f"than the memory holds ({bytes_text(memory_bytes)}), so it may wait for the disk"
    )


def disturb(record: TrialRecord, beyond: Sequence[Disturbance]) -> None:
    """Sets a trial's outcome to `disturbed` and keeps its measurement as evidence."""
    measured = {"outcome": str(record.outcome), "reason": record.reason, "value": record.value, "ci": record.ci}
    record.evidence[MEASURED] = measured
    record.outcome, record.reason = Outcome.disturbed, "; ".join(one.words for one in beyond)
    record.value = record.ci = None


def shared(records: Iterable[TrialRecord]) -> str:
    """Returns the latest `own_share` sentence, and the numbers of all trials with such a sentence; "" if there is none."""
    affected = [(record.number, words) for record in records if (words := record.evidence.get(OWN_SHARE))]
    if not affected:
        return ""
    numbers = ", ".join(str(number) for number, _ in affected)
    return f"{affected[-1][1]} (trial{'s' if len(affected) > 1 else ''} {numbers})"


def note(record: TrialRecord, found: Sequence[Disturbance]) -> None:
    """Writes disturbances into a trial's evidence, whether accepted or not."""
    if found:
        record.evidence[DISTURBANCES] = [asdict(one) for one in found]


def disturbed_by(record: TrialRecord) -> str:
    """Returns what disturbed a trial, whether accepted or not; "" if nothing did."""
    return "; ".join(one["words"] for one in record.evidence.get(DISTURBANCES, []))


def caveat(records: Iterable[TrialRecord]) -> dict[str, Any] | None:
    """Returns the disturbance that the study accepted, {"since_trial", "level", "words"}; None for a quiet machine."""
    accepted = [record for record in records if record.evidence.get(ACCEPTED)]
    if not accepted:
        return None
    last = accepted[-1]
    return {"since_trial": accepted[0].number, "level": last.evidence[ACCEPTED], "words": disturbed_by(last)}


def drift(records: Sequence[TrialRecord]) -> str:
    """Returns a sentence on how much the baseline's measurements differ, if that is more than noise; "" otherwise.

    The ratio of the finals does not show this, because the finals compare only measurements of the same round. The baseline's
    rates in these rounds may not show it either: they may agree by chance, or conditions may have changed since the search. So
    the baseline's first measurement is included.
    """
    again = [record for record in records if record.number and record.repeats == 0 and record.kind is not Kind.parity]
    rates = [record.value for record in [*records[:1], *again] if record.value and record.outcome.may_win]
    if len(rates) < 2 or rates[0] != records[0].value or max(rates) < DRIFT_FACTOR * min(rates):
        return ""
    rest = f"{number_text(min(rates[1:]))} to {number_text(max(rates[1:]))}" if len(rates) > 2 else number_text(rates[-1])
    return (
        f"the unchanged program ran at {number_text(rates[0])} {records[0].unit}/s first and at {rest} when measured again: "
        "these rates cannot be reproduced, but the ratio compares only runs that were measured right after each other"
    )
