"""What a replayed search meets: repeats of a table, served one after the other, and the truth that it never sees.

A search that is served a lucky repeat picks it and would be praised for its luck: serving and judging by the same numbers
inflates the optimum. So of each configuration one repeat is held out, drawn anew for each search, and a search is judged by
repeats that it was not served; what the finals choose by those that their choosing rounds were not served either.

Finals ask for more repeats than anybody records. When those of a configuration are used up, further ones are made: the mean
of what may be served times the residual of another recorded repeat, of whatever configuration (a residual bootstrap: Davison
& Hinkley, Bootstrap Methods, 6.2.3), so that rounds vary from process to process as they did on the recorded machine.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from autotune.replay.table import Key, Measurement, Table

MIN_REPEATS = 2  # of a configuration: with fewer none can be held out


class Use(enum.Enum):
    """What a served measurement is for."""

    search = "it is what the search sees"
    choice = "it chooses among the finalists"
    parts = "it takes the chosen one apart"
    report = "it is reported, and has no part in any choice"


class World:
    """One table as one search meets it.

    Attributes:
        optimum: as `optimum_of` says.
        serves: what is done with what is served now.

    Args:
        table: what was recorded.
        keys: configurations that can be asked for.
        seed: of the order of repeats, and of which are held out.
    """

    def __init__(self, table: Table, keys: Collection[Key], *, seed: int) -> None:
        self.serves = Use.search
        self._random = random.Random(f"world {seed}")
        everything = table.by_configuration()
        self._all = {key: everything[key] for key in sorted(keys, key=sorted_key)}  # sets differ from process to process
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
        """Returns a measurement of a configuration; None for one that is not in the table."""
        if key not in self._all:
            return None
        found = self._left[key].pop() if self._left[key] else self.another(key)
        self._served[self.serves][key].add(found.number)
        return found

    def another(self, key: Key) -> Measurement:
        """Returns a made-up repeat of a configuration that varies as recorded ones do."""
        like = self._random.choice(self._may_be_served[key])
        served = [one.value for one in self._may_be_served[key] if one.value]
        if not like.value or not served:
            return like
        centre = sum(map(math.log, served)) / len(served)
        return scaled(like, math.exp(centre + self._random.choice(self._residuals)) / like.value)

    def truth(self, key: Key, *uses: Use) -> float:
        """Returns the mean over the repeats that were served for none of the uses; 0 for a configuration that gives no rate."""
        served = {number for use in uses for number in self._served[use][key]}
        unseen = [one for one in self._all[key] if one.number not in served]
        return mean(unseen) or mean(self._all[key]) or 0.0

    def held_out(self, key: Key) -> float:
        """Returns the repeat that was served to neither search nor finals; 0 for one without a rate."""
        served = {one.number for one in self._may_be_served[key]}
        unseen = [one for one in self._all[key] if one.number not in served]
        return mean(unseen) or mean(self._all[key]) or 0.0

    def fraction(self, key: Key, *uses: Use) -> float:
        """Returns the truth of a configuration as a fraction of the optimum's, see `truth`."""
        return self.truth(key, *uses) / self.truth(self.optimum, *uses)

    def final_fraction(self, key: Key) -> float:
        """Returns the same of what the finals handed over, by what they were not served either."""
        return self.held_out(key) / self.held_out(self.optimum)


def optimum_of(groups: Mapping[Key, Sequence[Measurement]]) -> Key:
    """Returns the configuration with the highest mean over all its repeats, of those that may win in most of them."""
    return max(groups, key=lambda key: (worth(groups[key]), sorted_key(key)))


def worth(repeats: Sequence[Measurement]) -> float:
    """Returns what a configuration is worth: its mean rate where it may win in most of its repeats, else 0."""
    may_win = [one for one in repeats if one.outcome.may_win]
    return (mean(may_win) or 0.0) if 2 * len(may_win) > len(repeats) else 0.0


def mean(measurements: Sequence[Measurement]) -> float | None:
    """Returns the mean rate over the measurements that have one; None when none has."""
    rates = [one.value for one in measurements if one.value]
    return sum(rates) / len(rates) if rates else None


def residuals(configurations: Collection[Sequence[Measurement]]) -> list[float]:
    """Returns how far each repeat lies from the mean of its configuration, on the log scale, freed of the mean's own error."""
    found = []
    for measurements in configurations:
        logs = [math.log(one.value) for one in measurements if one.value]
        if len(logs) >= MIN_REPEATS:
            centre, growth = sum(logs) / len(logs), math.sqrt(len(logs) / (len(logs) - 1))
            found += [(log - centre) * growth for log in logs]
    return found or [0.0]


def scaled(measurement: Measurement, factor: float) -> Measurement:
    """Returns a measurement whose rate is another, its window and blocks with it."""
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
    """Returns a text that orders configurations, the same in every process."""
    return repr(sorted(key, key=repr))
