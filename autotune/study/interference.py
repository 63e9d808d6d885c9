"""Decides whether search trials may run in parallel: only if they do not slow each other down.

A calibration finds this out. It measures one configuration in pairs: once alone, and once on all slots at the same time. (A
slot runs one trial at a time. The neighbours of a trial run on other slots at the same time.) With many slots, only the first
pair uses all of them. The further pairs use the machines whose slots were the slowest in the first pair.

Trials of finals, attribution and verification always run alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

from autotune import stats
from autotune.config.wrapped_commands import program_of
from autotune.quantities import seconds_text
from autotune.records import Kind, Outcome, TrialRecord, last_round
from autotune.trials.budget import CACHED_FRAC
from autotune.trials.places import Place, slot_number
from autotune.trials.session import Session

MIN_PAIRS, MAX_PAIRS = 4, 8  # fewest pairs after which trials may run in parallel; most pairs of a calibration
# Trials run in parallel only if the whole interval of the ratio (rate in parallel / rate alone) lies above 1 minus a margin.
# The margin is MARGIN_FRAC or the machine's spread, whichever is larger, but at most MAX_MARGIN_FRAC. MARGIN_FRAC is twice the
# finals' margin, because neighbours slow all configurations alike, and the finals run without neighbours.
MARGIN_FRAC, MAX_MARGIN_FRAC = 2 * stats.MARGIN_FRAC, 0.05
# A calibration ends after CLEAR_PAIRS pairs if neighbours cost more than CLEAR_FRAC of the rate in every pair.
CLEAR_PAIRS, CLEAR_FRAC = 2, 0.1
# From the second pair on, only as many machines are used as it takes to have at least this many slots. All slots of these
# machines run, because neighbours compete for a machine's memory, disk and power. The first pair uses all machines, so it shows
# whether trials slow each other through something that the machines share, like a file system. If parallel trials are more than
# about 5 % slower in the first pair but not in the others, the interval is too wide to allow parallel trials.
SAMPLE_SLOTS = 16
SLOT_MARGINS = 3  # the ratio of a single slot may fall below 1 by this many margins
MAX_LOST = 2  # after this many pairs in a row without a measurement, the calibration is given up
# Slots that are slower than the others, or on which every trial fails, are left out, but at most this share of all slots. If
# more slots are slow or fail, neighbours are the likelier cause.
LEFT_OUT_FRAC = 1 / 4
# A calibration is repeated once the best is AGAIN_FACTOR times as fast as at the last calibration. Otherwise it is repeated
# after AGAIN_TRIALS trials, but so rarely that calibrations take at most AGAIN_FRAC of the search's time.
AGAIN_FACTOR, AGAIN_TRIALS = 1.5, 20
AGAIN_FRAC = 0.1
# A calibration takes place only if it pays: without it, N trials fit on one slot; after it, at least PAYS_FACTOR * N trials
# must fit in parallel. The factor is above 1, because the calibration may end with one slot, and because parallel trials are
# chosen from fewer results.
PAYS_FACTOR = 1.25
NO_OTHER = "no other slot is left"
STANDALONE = "--standalone"  # option of torchrun: its processes meet at a free port


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How a trial's rate with neighbours compares with its rate alone.

    Attributes:
        ratio: rate with neighbours over rate alone.
        margin: by how much the ratio may fall below 1.
        slowest: name and ratio of the slowest slot among those that ran in every pair.
        num_slots: number of slots that ran in every pair.
        slow: name and ratio of each slot whose ratio is more than SLOT_MARGINS margins below 1.
    """

    ratio: stats.Ratio
    margin: float
    slowest: tuple[str, float]
    num_slots: int
    slow: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_allowed(self) -> bool:
        """Whether neighbours certainly cost at most the margin on average, and at most SLOT_MARGINS margins on any slot.

        Also False if a trial is certainly faster with neighbours than alone, by more than the margin. This happens if a trial
        is faster with fewer threads, because it has fewer of them with neighbours. So the two rates cannot be compared.
        """
        num, ci = self.ratio.num_rounds, self.ratio.ci
        return not self.slow and num >= MIN_PAIRS and ci is not None and 1 - self.margin <= ci[0] <= 1 + self.margin

    @property
    def is_over(self) -> bool:
        """Whether no more pairs are needed: the answer is clear, or there are MAX_PAIRS pairs."""
        num, ci = self.ratio.num_rounds, self.ratio.ci
        if num < CLEAR_PAIRS or ci is None:
            return False
        is_clear = ci[1] < 1 - self.margin or ci[0] > 1 + self.margin
        return self.is_allowed or num >= MAX_PAIRS or (num >= MIN_PAIRS and is_clear)


class Interference:
    """The number of trials of a study that may run in parallel. Create it once the baseline has been measured."""

    def __init__(self, session: Session) -> None:
        self._session, self._num = session, len(session.runner.beside)
        self._calibrated: TrialRecord | None = None  # configuration of the last calibration
        self._hosts: list[str] = []  # machines of the slots in that calibration, one entry for each slot
        self._num_searched, self._ended_s, self._took_s = 0, 0.0, 0.0
        self._num_measured = 0  # slots in the first pair of the last calibration

    def begin(self, baseline: TrialRecord) -> None:
        """Tells the user if trials cannot run in parallel, as far as this is known before the search.

        If the study was resumed and its slots are on the same machines as before, its last calibration still holds.
        """
        if self._num < 2 or self._left_s(self._each_s(baseline)) <= 0 or self._recall():
            return
        if why := self._why_not(baseline):
            self._use_one(why)

    def check(self, best: TrialRecord) -> None:
        """Calibrates if a calibration is due, and tells the user the result. Does nothing if there is only one slot."""
        if self._num > 1:
            self._num = min(self._num, len(self._session.runner.beside))  # slots may have been left out
            if why := self._why_never if self._num > 1 else NO_OTHER:
                self._use_one(why)
        if self._num < 2 or not (self._is_unlike(best) or self._has_moved or self._is_long_ago):
            return
        if self._left_s(self._each_s(best)) <= 0:  # for example in a study that is resumed in the finals
            return
        self._num = int(min(self._num, max(2, self._num_left)))
        if why := self._why_not(best):
            if self._is_unlike(best) or self._has_moved:
                self._use_one(why)
            return
        began_s, first = self._session.inputs.clock.monotonic(), self._calibrated is None
        found = self._measured(best)
        self._calibrated, self._num_searched = best, self._session.num_searched
        self._ended_s = self._session.inputs.clock.monotonic()
        self._took_s = self._ended_s - began_s
        self._hosts = self._hosts_now
        self._session.about.slots = self._as_json(found)
        if found is None:
            failed = f"the configuration of trial {best.number} could not be measured in parallel"
            self._use_one(failed if self._num > 1 else NO_OTHER)
        elif not found.is_allowed:
            self._use_one(self._words(found))
        else:
            self._session.schedule.num_slots = self._num
            self._session.folder.write_study(self._session.about)
            if first:
                self._session.listener.notice(f"{self._num} trials at a time: {self._words(found)}.")

    def _recall(self) -> bool:
        """Reuses the calibration of an earlier run of the study; returns False if it does not hold for the present slots."""
        session, known = self._session, self._session.about.slots
        self._hosts = known.get("hosts", [])
        first = next((one for one in session.records if one.number == known.get("trial")), None)
        if first is None or known.get("ratio") is None or self._hosts != self._hosts_now:
            return False
        self._calibrated, self._num_searched = first, session.num_searched
        self._ended_s, self._took_s = session.inputs.clock.monotonic(), known.get("took_s", 0.0)
        if not known.get("allows"):
            self._use_one(known.get("why_one", ""))
            return True
        session.schedule.num_slots = self._num
        session.about.slots = {**known, "num": self._num, "why_one": ""}
        session.folder.write_study(session.about)
        rate = f"{known['ratio']:.3f} of its rate alone"
        session.listener.notice(f"{self._num} trials at a time, as before: in parallel with the others, a trial ran at {rate}.")
        return True

    @property
    def _hosts_now(self) -> list[str]:
        return sorted(place.host for place in self._session.runner.beside[: self._num])

    @property
    def _has_moved(self) -> bool:
        """Whether a lost slot was replaced, so that a machine has more slots now than in the last calibration."""
        return bool(Counter(self._hosts_now) - Counter(self._hosts))

    def _is_unlike(self, best: TrialRecord) -> bool:
        """Whether the best is too fast for the last calibration to apply to it; True before the first calibration."""
        known = self._calibrated
        return known is None or (best.score or 0.0) >= AGAIN_FACTOR * (known.score or math.inf)

    @property
    def _is_long_ago(self) -> bool:
        session = self._session
        is_long_ago = session.inputs.clock.monotonic() - self._ended_s >= self._took_s / AGAIN_FRAC
        return is_long_ago and session.num_searched - self._num_searched >= AGAIN_TRIALS

    @property
    def _why_never(self) -> str:
        """Returns why trials of this program cannot run in parallel on these slots; "" if they may."""
        session = self._session
        evidence = session.baseline.evidence
        if left := [*evidence.get("files_left", {}), *evidence.get("files_kept", [])]:
            return f"the program writes {left[0]}, which parallel trials would share"
        hosts = [place.host for place in session.runner.beside]  # a lost slot may be replaced by one on another machine
        if session.baseline.ranks and len(set(hosts)) < len(hosts) and not _takes_free_ports(session.inputs.command.argv({})):
            return (
                "the program starts several processes, and those of two trials on one machine could meet at the same port "
                f"(with torchrun {STANDALONE} they could not)"
            )
        return ""

    def _why_not(self, best: TrialRecord) -> str:
        """Returns why trials cannot run in parallel, as far as this is known without a calibration; "" if they may."""
        if why := self._why_never:
            return why
        each_s = self._each_s(best)
        needed_s, left_s = 2 * MIN_PAIRS * each_s, self._left_s(each_s)
        if (left_s - needed_s) * self._num < PAYS_FACTOR * left_s:
            return (
                f"testing whether parallel trials disturb each other takes {seconds_text(needed_s)}, too long for a search of "
                f"about {seconds_text(left_s)}"
            )
        return ""

    @staticmethod
    def _each_s(best: TrialRecord) -> float:
        """Returns the expected seconds of a trial of a configuration whose compilation is in the study's cache."""
        return max(best.fresh_s - (1 - CACHED_FRAC) * best.phases_s.get("compile", 0.0), 1e-9)

    def _left_s(self, each_s: float) -> float:
        """Returns the seconds that the search would still take on one slot if each trial takes `each_s`."""
        left_s = min(self._session.budget.search_left_s, self._num_left * each_s)
        return left_s if math.isfinite(left_s) else 1e12

    @property
    def _num_left(self) -> float:
        """Number of search trials that the budget allows; infinite without a limit."""
        limit = self._session.budget.max_trials
        return math.inf if limit is None else limit - self._session.num_searched

    def _use_one(self, why: str) -> None:
        self._num = 1
        self._session.schedule.stay_alone()
        self._session.about.slots |= {"num": 1, "why_one": why}
        self._session.folder.write_study(self._session.about)
        self._session.listener.notice(f"One trial at a time: {why}.")

    def _measured(self, best: TrialRecord) -> Calibration | None:
        """Measures pairs, alone and with neighbours, until the answer is known or the search's time is used up.

        Returns None if MAX_LOST pairs in a row failed, or if there was no complete pair.
        """
        session, num_lost = self._session, 0
        places: Sequence[Place] = session.runner.beside[: self._num]
        self._num_measured = len(places)
        pairs: list[tuple[float, dict[str, float]]] = []
        failing = {place.number for place in places}  # slots on which every trial failed
        found: Calibration | None = None
        while num_lost < MAX_LOST and len(places) > 1:
            if self._left_s(self._each_s(best)) <= 0:  # the finals need the rest
                return found
            number = 1 + last_round(session.records, Kind.check)
            is_alone_first = bool(number % 2)
            order: list[Sequence[Place]] = [[], places] if is_alone_first else [places, []]  # [] is the trial alone
            measured = [_rates(session.calibrate(best, on, round_number=number)) for on in order]
            alone, beside = measured if is_alone_first else measured[::-1]
            failing -= beside.keys()
            num_gone = sum(place not in session.runner.beside for place in places)
            if num_gone:  # slots were lost for good, so this pair had too few neighbours and does not count
                self._num -= num_gone
                places = [place for place in places if place in session.runner.beside]
                continue
            if len(alone) != 1 or len(beside) != len(places):
                num_lost += 1
                if len(alone) == 1 and num_lost == MAX_LOST and self._leave_out(dict.fromkeys(failing, 0.0)):
                    places = [place for place in places if place.number not in failing]
                    self._num_measured, num_lost, failing = len(places), 0, set()
                continue
            num_lost = 0
            pairs.append((next(iter(alone.values())), beside))
            places = _slowest_machines(places, beside) if len(pairs) == 1 else places
            found = calibration(pairs)
            kept = _without(pairs, found.slow) if self._are_few(found.slow) else pairs
            if not kept[-1][1]:  # all slots of the slowest machines are slow: go on with the next machines
                self._leave_out(found.slow)
                pairs = kept[:1]
                places = _slowest_machines(session.runner.beside[: self._num], pairs[0][1])
                continue
            without = calibration(kept)
            if without.is_over or _is_clear(kept):
                return without if without.is_allowed and self._leave_out(found.slow) else found
        return None

    def _are_few(self, slots: Collection[str]) -> bool:
        """Whether the slots are so few that they may be left out."""
        return 0 < len(slots) <= LEFT_OUT_FRAC * self._num

    def _leave_out(self, slots: Mapping[str, float]) -> bool:
        """Leaves slots out and tells the user; returns False if they are too many. A ratio of 0 says that all trials failed."""
        if not self._are_few(slots):
            return False
        self._session.schedule.leave_out(slots)
        self._num -= len(slots)
        for slot, ratio in slots.items():
            why = f"a trial there ran at {ratio:.3f} of its rate alone" if ratio else "all of its trials failed"
            self._session.listener.notice(f"Slot {slot} is left out: {why}, unlike on the other slots.")
        return True

    def _words(self, found: Calibration) -> str:
        ci = found.ratio.ci
        sample = f"; all but the first ran on only {found.num_slots} slots" if found.num_slots < self._num else ""
        interval = f" ({ci[0]:.3f} to {ci[1]:.3f}, {found.ratio.num_rounds} pairs{sample})" if ci else ""
        others = "1 other" if self._num_measured == 2 else f"{self._num_measured - 1} others"
        slot, ratio = found.slowest
        slower = (
            f"; slot {slot} ran at {ratio:.3f}" if found.slow and found.ratio.ratio >= 1 - SLOT_MARGINS * found.margin else ""
        )
        return f"in parallel with {others}, a trial ran at {found.ratio.ratio:.3f} of its rate alone{interval}{slower}"

    def _as_json(self, found: Calibration | None) -> dict[str, Any]:
        """Returns the entry of study.json."""
        if found is None:
            return {"num": self._num, "ratio": None, "ci": None, "num_pairs": 0, "why_one": ""}
        ratio, sample = found.ratio, {"num_sampled": found.num_slots} if found.num_slots < self._num else {}
        is_cut_off = not found.is_allowed and self._session.budget.search_left_s <= 0  # a larger budget may allow more
        to_recall = {
            "allows": found.is_allowed,
            "trial": self._calibrated.number if self._calibrated else None,
            "hosts": [] if is_cut_off else self._hosts,  # with [], a resumed study calibrates again
            "took_s": self._took_s,
        }
        result = {"num": self._num, "ratio": ratio.ratio, "ci": ratio.ci, "num_pairs": ratio.num_rounds, "why_one": ""}
        return {**result, **sample, **to_recall}


class Uncalibrated(Interference):
    """A fixed number of slots, for replays: recorded trials had no neighbours."""

    def begin(self, baseline: TrialRecord) -> None:
        """Does nothing."""

    def check(self, best: TrialRecord) -> None:
        """Does nothing."""


def calibration(pairs: Sequence[tuple[float, dict[str, float]]]) -> Calibration:
    """Returns the calibration that follows from pairs: (rate alone, {name of the slot: rate in parallel}).

    The ratio is computed over all slots of a pair. Single slots are judged only if they ran in every pair.
    """
    alone = [rate for rate, _ in pairs]
    ratio = stats.paired_ratio([geometric_mean(beside.values()) for _, beside in pairs], alone)
    slots = [slot for slot in pairs[0][1] if all(slot in beside for _, beside in pairs)]
    by_slot = {slot: geometric_mean(beside[slot] / rate for rate, beside in pairs) for slot in slots}
    slowest = min(by_slot.items(), key=lambda pair: pair[1], default=("", 1.0))
    margin = min(MAX_MARGIN_FRAC, max(MARGIN_FRAC, stats.spread_frac(alone)))
    slow = {slot: ratio for slot, ratio in by_slot.items() if ratio < 1 - SLOT_MARGINS * margin}
    return Calibration(ratio=ratio, margin=margin, slowest=slowest, num_slots=len(slots), slow=slow)


def _without(pairs: Sequence[tuple[float, dict[str, float]]], slots: Container[str]) -> list[tuple[float, dict[str, float]]]:
    """Returns the pairs without the rates of some slots."""
    return [(alone, {slot: rate for slot, rate in beside.items() if slot not in slots}) for alone, beside in pairs]


def _is_clear(pairs: Sequence[tuple[float, dict[str, float]]]) -> bool:
    """Whether neighbours cost more than CLEAR_FRAC of the rate in each of at least CLEAR_PAIRS pairs."""
    costs = [geometric_mean(beside.values()) < (1 - CLEAR_FRAC) * alone for alone, beside in pairs]
    return len(costs) >= CLEAR_PAIRS and all(costs)


def _takes_free_ports(command: list[str]) -> bool:
    """Whether a command's processes meet at a port that is free when they start, instead of at a fixed port."""
    program = program_of(command)
    return program.starter == "torchrun" and STANDALONE in itertools.takewhile(lambda word: word != program.script, command)


def _slowest_machines(places: Sequence[Place], rates: Mapping[str, float]) -> Sequence[Place]:
    """Returns all slots of the machines with the slowest slots: enough machines to have SAMPLE_SLOTS slots."""
    found: list[Place] = []
    for host in dict.fromkeys(place.host for place in sorted(places, key=lambda place: rates.get(place.number, math.inf))):
        if len(found) < SAMPLE_SLOTS:
            found += [place for place in places if place.host == host]
    return found


def _rates(records: Sequence[TrialRecord]) -> dict[str, float]:
    """Returns {slot: rate}, without failed trials. Trials that violate a constraint count, as the baseline may do so."""
    measured = (one for one in records if one.outcome in (Outcome.ok, Outcome.infeasible))
    return {slot_number(one.slot): one.value for one in measured if one.value}
