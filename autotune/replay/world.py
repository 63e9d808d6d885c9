"""Answers a replayed search with recorded measurements, and judges the search by measurements that it has not seen.

A table holds several recorded measurements of each configuration, its repeats.

A search tends to pick a configuration whose served repeat was lucky. If the search were judged by the same repeat, it would be
rewarded for luck. So a search is judged by repeats that it has not seen. For each search, one random repeat of each
configuration is never served. The finals' choice is judged by repeats that neither the search nor the choosing rounds have
seen.

Finals need more repeats than are recorded. When the repeats of a configuration are used up, more are simulated. A simulated
repeat is the geometric mean of the configuration's repeats that may be served, times a recorded deviation. A deviation is a
random repeat of any configuration, divided by the geometric mean of that configuration (see `residuals`). So simulated repeats
vary as much as the recorded ones. This is a residual bootstrap (Davison & Hinkley, Bootstrap Methods, 6.2.3).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from autotune import stats
from autotune.records import Knobs
from autotune.replay.table import Key, Measurement, Table, key_of

MIN_REPEATS = 2  # with fewer repeats of a configuration, none is held out, and no residuals are computed


class Use(enum.Enum):
    """What a served measurement is used for."""

    search = "it is what the search sees"
    choice = "it chooses among the finalists"
    parts = "it belongs to the ablation of the chosen configuration"
    report = "it is reported, and has no part in any choice"


class World:
    """One table as one search sees it.

    Attributes:
        optimum: see `optimum_of`.
        serves: what the next served measurements are used for; set by the caller.

    Args:
        table: the recording.
        keys: configurations that a search may request.
        seed: determines the order of repeats, and which repeats are held out.
    """

    def __init__(self, table: Table, keys: Collection[Key], *, seed: int) -> None:
        self.serves = Use.search
        self._random = random.Random(f"world {seed}")
        everything = table.by_configuration()
        # `keys` may be a set, whose order differs between processes.
        self._all = {key: everything[key] for key in sorted(keys, key=sorted_key)}
        self._left: dict[Key, list[Measurement]] = {}
        self._may_be_served: dict[Key, list[Measurement]] = {}
        self._served: dict[Use, dict[Key, set[int]]] = {use: defaultdict(set) for use in Use}
        for key, repeats in self._all.items():
            shuffled = self._random.sample(repeats, len(repeats))
            self._may_be_served[key] = shuffled[1:] if len(shuffled) >= MIN_REPEATS else shuffled
            self._left[key] = list(self._may_be_served[key])
        self._residuals = residuals(self._all.values())
        self.optimum = optimum_of(self._all)

    def serve(self, key: Key) -> Measurement | None:
        """Returns a measurement of a configuration; None if it is not in the table."""
        if key not in self._all:
            return None
        found = self._left[key].pop() if self._left[key] else self.another(key)
        self._served[self.serves][key].add(found.number)
        return found

    def another(self, key: Key) -> Measurement:
        """Returns a simulated repeat of a configuration."""
        like = self._random.choice(self._may_be_served[key])
        served = [one.value for one in self._may_be_served[key] if one.value]
        if not like.value or not served:
            return like
        centre = sum(map(math.log, served)) / len(served)
        return scaled(like, math.exp(centre + self._random.choice(self._residuals)) / like.value)

    def truth(self, key: Key, *uses: Use) -> float:
        """Returns a configuration's mean rate over repeats not served for these uses; over all repeats if all were served."""
        return self._mean_besides(key, {number for use in uses for number in self._served[use][key]})

    def held_out(self, key: Key) -> float:
        """Returns the rate of the held-out repeat, which is never served; the mean over all repeats, if none was held out."""
        return self._mean_besides(key, {one.number for one in self._may_be_served[key]})

    def _mean_besides(self, key: Key, served: Collection[int]) -> float:
        """Returns the mean rate over the repeats that are not in `served`.

        If these repeats have no rate, returns the mean over all repeats; 0 if no repeat has a rate.
        """
        unseen = [one for one in self._all[key] if one.number not in served]
        return mean(unseen) or mean(self._all[key]) or 0.0

    def fraction(self, key: Key, *uses: Use) -> float:
        """Returns the `truth` of a configuration divided by the `truth` of the optimum."""
        return self.truth(key, *uses) / self.truth(self.optimum, *uses)

    def final_fraction(self, key: Key) -> float:
        """Returns the `held_out` rate of a configuration divided by the `held_out` rate of the optimum."""
        return self.held_out(key) / self.held_out(self.optimum)

    def needless(self, changed: Knobs) -> list[str]:
        """Returns the knobs whose change raises the rate by at most MARGIN_FRAC.

        Rates are means over all repeats, since a single repeat is too noisy. A knob is not returned if the table has no rate
        for the configuration without its change.
        """
        whole = worth(self._all[key_of(changed)])
        rest = {knob: key_of({other: value for other, value in changed.items() if other != knob}) for knob in changed}
        without = {knob: worth(self._all.get(key, ())) for knob, key in rest.items()}
        return [knob for knob, rate in without.items() if rate and whole <= rate * (1 + stats.MARGIN_FRAC)]


def optimum_of(groups: Mapping[Key, Sequence[Measurement]]) -> Key:
    """Returns the configuration with the highest `worth`."""
    return max(groups, key=lambda key: (worth(groups[key]), sorted_key(key)))


def worth(repeats: Sequence[Measurement]) -> float:
    """Returns the mean rate of a configuration's repeats that worked (`Outcome.may_win`); 0 if at most half did."""
    may_win = [one for one in repeats if one.outcome.may_win]
    return (mean(may_win) or 0.0) if 2 * len(may_win) > len(repeats) else 0.0


def mean(measurements: Sequence[Measurement]) -> float | None:
    """Returns the mean rate over the measurements that have one; None if none has."""
    rates = [one.value for one in measurements if one.value]
    return sum(rates) / len(rates) if rates else None


def residuals(configurations: Collection[Sequence[Measurement]]) -> list[float]:
    """Returns the residual of each repeat, on the log scale.

    With n repeats, residuals are multiplied by sqrt(n / (n - 1)). Otherwise they would be too small, because the mean is
    estimated from the same repeats.
    """
    found = []
    for measurements in configurations:
        logs = [math.log(one.value) for one in measurements if one.value]
        if len(logs) >= MIN_REPEATS:
            centre, growth = sum(logs) / len(logs), math.sqrt(len(logs) / (len(logs) - 1))
            found += [(log - centre) * growth for log in logs]
    return found or [0.0]


def scaled(measurement: Measurement, factor: float) -> Measurement:
    """Returns a measurement with its rate, window and blocks scaled by a factor."""
    results = []
    for result in measurement.results:
        window = dict(result["window"]) if result.get("window") else None
        if window is not None:
            window["rate_per_s"] *= factor
            window["samples"] *= factor
            window["block_rates_per_s"] = [rate * factor for rate in window["block_rates_per_s"]]
        rate = result.get("throughput_per_s")
        results.append({**result, "window": window, "throughput_per_s": rate * factor if rate else rate})
    value = measurement.value * factor if measurement.value else None
    return dataclasses.replace(measurement, value=value, results=results)


def sorted_key(key: Key) -> str:
    """Returns a sort key for configurations that is the same in every process."""
    return repr(sorted(key, key=repr))
