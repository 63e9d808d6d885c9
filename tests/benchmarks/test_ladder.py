"""How the ladder (an expert who tries one knob after the other) chooses and compares, with rates from a table."""

import pytest

from autotune.harness.protocol import MeasureRules
from autotune.records import Knobs, Outcome
from tests.benchmarks import ladder
from tests.benchmarks.trials import Measured

HOST = {"num_cores": 2, "gpus": []}


class TableBench:
    """A bench with a made-up program: a value multiplies its rate by a factor (.9 if none is given); None makes it fail."""

    def __init__(self, factors: dict[tuple[str, object], float | None]) -> None:
        self.factors = factors
        self.observed: Knobs = {"loader.batch_size": 32}
        self.asked: list[Knobs] = []

    def measure(self, knobs: Knobs, rules: MeasureRules) -> Measured:
        self.asked.append(knobs)
        rate_per_s = 100.0
        for item in knobs.items():
            factor = self.factors.get(item, 0.9)
            if factor is None:
                return Measured(rate_per_s=None, outcome=Outcome.host_oom, reason="too large", seconds=1.0)
            rate_per_s *= factor
        return Measured(rate_per_s=rate_per_s, outcome=Outcome.ok, reason="", seconds=1.0)


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "host_facts", lambda: HOST)


def test_each_rung_builds_on_the_fastest_configuration_so_far() -> None:
    bench = TableBench({("precision.amp", "bf16"): 2.0, ("loader.num_workers", 1): 1.5, ("compile.mode", "default"): 1.1})
    climber = ladder.Ladder(bench)  # type: ignore[arg-type]
    climber.climb()
    assert climber.best == {"precision.amp": "bf16", "loader.num_workers": 1, "compile.mode": "default"}
    assert bench.asked[0] == {}


def test_ladder_doubles_the_batch_and_rejects_one_that_cannot_run() -> None:
    bench = TableBench({("loader.batch_size", 64): 1.2, ("loader.batch_size", 128): None})
    climber = ladder.Ladder(bench)  # type: ignore[arg-type]
    climber.climb()
    assert climber.best == {"loader.batch_size": 64}
    assert [knobs["loader.batch_size"] for knobs in bench.asked if "loader.batch_size" in knobs][:2] == [64, 128]


def test_both_winners_are_measured_in_the_order_abba() -> None:
    bench = TableBench({("a", 1): 2.0, ("b", 1): 1.0})
    ours, theirs = ladder.duel(bench, {"a": 1}, {"b": 1}, 2)  # type: ignore[arg-type]
    assert [next(iter(knobs)) for knobs in bench.asked] == ["a", "b", "b", "a"]
    assert (ours, theirs) == ([200.0, 200.0], [100.0, 100.0])


def test_a_winner_that_no_longer_trains_ends_the_comparison() -> None:
    bench = TableBench({("a", 1): None})
    with pytest.raises(SystemExit, match="winner did not train when measured again: host_oom: too large"):
        ladder.duel(bench, {"a": 1}, {}, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speedup", "words"),
    [
        (None, "none"),
        ({"verdict": "faster", "ratio": 1.234}, "faster 1.23x"),
        ({"verdict": "ambiguous", "ratio": None}, "ambiguous"),
    ],
)
def test_verdict_text_includes_the_ratio_if_there_is_one(speedup: dict[str, object] | None, words: str) -> None:
    assert ladder._verdict({"speedup": speedup}) == words  # type: ignore[typeddict-item]
