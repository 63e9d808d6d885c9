"""Prints how good searches with several trials in parallel are on recorded tables, and how much time they save.

    python -m tests.benchmarks.parallel_tables tests/data/replay/*.jsonl.gz --seeds 20 --trials 25 --slots 1,4,16

The numbers of trials are those of the search, without the trials of the finals. For simulated machines, there is
`python -m tests.benchmarks.search --pending`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.errors import BadInput
from autotune.replay.bench import Asked, run
from autotune.replay.figures import at_trials
from autotune.replay.strategies import SLOTS
from autotune.replay.study import Limits, Replayed
from tests.benchmarks.reporting import table

AT = (4, 10, 16, 20, 25)
HEAD = ("table", "in parallel", *map(str, AT), "exported", "trials", "search", "study")


def main(words: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.parallel_tables", description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="+", type=Path, help="files that `autotune record` wrote")
    parser.add_argument("--seeds", type=int, default=20, help="studies on each table for each number in --slots")
    parser.add_argument("--trials", type=int, default=25, help="search trials of a study")
    parser.add_argument("--slots", default="1,4,16", help="numbers of trials in parallel, compared with the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(words)
    nums = [int(word) for word in options.slots.split(",")]
    limits, names = Limits(trials=options.trials), [f"default:{SLOTS}={num}" for num in nums]
    asked = Asked(tables=options.tables, strategies=names, num_seeds=options.seeds, limits=limits, num_jobs=options.jobs)
    try:
        replays = run(asked)
    except BadInput as error:
        parser.error(str(error))
    found = {one.table.workload: dict(zip(nums, (one.studies[name] for name in names), strict=True)) for one in replays}
    found["all"] = {num: [study for one in found.values() for study in one[num]] for num in nums}
    print("fraction of the optimum after so many search trials, and of the exported configuration: median and mean\n")
    print(table(HEAD, [[name, num, *_row(studies)] for name, one in found.items() for num, studies in one.items()]))
    print("\nmeans divided by those of the first number in parallel, with standard errors over the studies (paired)\n")
    print(table(HEAD, [[name, num, *_ratios(one[num], one[nums[0]])] for name, one in found.items() for num in nums[1:]]))
    return 0


def _row(studies: Sequence[Replayed]) -> list[str]:
    fractions = [[at(one) for one in studies] for at in _FRACTIONS]
    return [
        *(f"{statistics.median(values):.3f} {statistics.mean(values):.3f}" for values in fractions),
        *(f"{statistics.median(map(at, studies)):.0f}" for at in _COSTS),
    ]


def _ratios(studies: Sequence[Replayed], first: Sequence[Replayed]) -> list[str]:
    ratios = [_ratio(list(map(at, studies)), list(map(at, first))) for at in (*_FRACTIONS, *_COSTS)]
    return [f"{ratio:.3f} ± {error:.3f}" for ratio, error in ratios]


def _ratio(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Returns the ratio of the means of paired values, and its standard error (by the delta method)."""
    mean = statistics.mean(others)
    ratio = statistics.mean(values) / mean
    rest = [value - ratio * other for value, other in zip(values, others, strict=True)]
    return ratio, statistics.pstdev(rest) / mean / math.sqrt(max(1, len(rest) - 1))


def _at(num: int) -> Callable[[Replayed], float]:
    return lambda study: at_trials(study.steps, num)


_FRACTIONS: list[Callable[[Replayed], float]] = [*map(_at, AT), lambda study: study.final_fraction]
_COSTS: list[Callable[[Replayed], float]] = [
    lambda study: len(study.steps) - 1,
    lambda study: study.steps[-1].seconds,
    lambda study: study.total_s,
]


if __name__ == "__main__":
    raise SystemExit(main())
