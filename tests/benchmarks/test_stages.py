"""How the stages judge their measurements: goals met and missed, with given numbers instead of measured ones."""

import time
from pathlib import Path
from typing import Any

import pytest

from autotune.harness.protocol import MeasureRules
from autotune.records import Knobs
from tests.benchmarks import rivals
from tests.benchmarks.gpu_campaign import document, explaining, overhead, record, rival, smoke, transformer, truth, tutorial
from tests.benchmarks.gpu_campaign.checks import Found, Missing, Place
from tests.benchmarks.gpu_campaign.document import Document
from tests.benchmarks.test_checks import HOST

GIB = 2**30
XML = """<testsuites><testsuite>
<testcase name="test_bf16_works" time="1.5"><properties><property name="samples/s" value="10 -> 30"/></properties></testcase>
<testcase name="test_a_kernel" time="0.1"><skipped message="transformers is not installed"/></testcase>
{more}</testsuite></testsuites>"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(document, "host_facts", lambda: dict(HOST))
    (tmp_path / "work").mkdir()
    return Place(
        stage="any",
        folder=tmp_path / "work",
        results=tmp_path,
        document=Document(tmp_path, is_dry=False),
        is_dry=False,
        until_s=time.monotonic() + 480,
    )


def given(place: Place, **measured: Any) -> None:
    for name, value in measured.items():
        place.kept(name.replace("_", " "), lambda value=value: value)


def met(found: Found) -> dict[str, bool]:
    return {goal.what: goal.is_met for goal in found.goals}


class Table:
    """Trials whose rates come from a table. loader.non_blocking is not applicable; large batches run out of memory."""

    def __init__(self, rates: dict[tuple[str, object], float], *, limit_bytes: float = float("inf")) -> None:
        self.rates, self.limit_bytes, self.asked = rates, limit_bytes, list[Knobs]()

    def measure(self, knobs: Knobs, rules: MeasureRules, *, again: int = 0) -> dict[str, Any]:
        self.asked.append(knobs)
        peak_bytes = GIB + 100 * 2**20 * int(knobs.get("loader.batch_size", 32))
        found = {"reason": "", "seconds": 5.0, "not_applied": {}, "memory": {"peak_bytes": peak_bytes}, "clock_gap_frac": None}
        if refused := {key: "not applicable" for key in knobs if key == "loader.non_blocking"}:
            return {**found, "outcome": "invalid", "rate_per_s": None, "not_applied": refused}
        if peak_bytes > self.limit_bytes:
            return {**found, "outcome": "device_oom", "reason": "CUDA out of memory", "rate_per_s": None}
        rate_per_s = 400.0
        for item in knobs.items():
            rate_per_s *= self.rates.get(item, 1.0)
        return {**found, "outcome": "ok", "rate_per_s": rate_per_s}


def study(ratio: float, **counts: int) -> dict[str, Any]:
    return {
        "unit": "samples", "baseline": {"value": 400.0, "trial": 0}, "counts": counts, "seconds": {"total": 300.0},
        "best": {"value": 400.0 * ratio, "trial": 7, "overrides": {"precision.amp": "bf16"}}, "attribution": [],
        "speedup": {"ratio": ratio, "verdict": "faster"}, "utilisation_frac": {"baseline": 0.31, "best": None},
    }  # fmt: skip


def test_hand_tuning_continues_without_a_refused_knob(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table({("loader.num_workers", 8): 4.0, ("loader.batch_size", 512): 1.5, ("compile.mode", "default"): 0.5})
    monkeypatch.setattr(tutorial, "recipe", lambda *_: table)
    found = tutorial.by_hand(place)
    assert found.evidence == "400 -> 2400 samples/s, 6.00x"
    assert "loader.non_blocking not applicable" in found.detail
    assert "loader.non_blocking" not in table.asked[-1]
    best = tutorial.fastest(tutorial.climb(place))
    assert best["knobs"]["loader.batch_size"] == 512
    assert "compile.mode" not in best["knobs"]


@pytest.mark.parametrize(("ratio", "num_oom", "expected"), [(9.0, 0, (True, True)), (8.0, 1, (False, False))])
def test_tutorial_has_goals_for_speedup_and_share_of_out_of_memory_trials(
    place: Place, ratio: float, num_oom: int, expected: tuple[bool, bool]
) -> None:
    given(place, study=study(ratio, ok=40, device_oom=num_oom))
    found = tutorial.by_autotune(place)
    assert met(found) == {"winner over the start": expected[0], "share of trials out of memory": expected[1]}
    assert "utilisation 31.0% -> unknown" in found.evidence


def test_winner_and_hand_tuned_configuration_are_measured_in_turn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table({("precision.amp", "bf16"): 2.2, ("loader.num_workers", 8): 2.0, ("loader.batch_size", 1024): 0.1})
    monkeypatch.setattr(tutorial, "recipe", lambda *_: table)
    given(place, study=study(2.2, ok=40))
    found = tutorial.against_each_other(place)
    assert met(found) == {"winner over the hand chain": True}
    assert ["precision.amp" in knobs for knobs in table.asked[-6:]] == [True, False, False, True, True, False]


def test_comparison_with_the_rival_has_goals_for_speedup_and_seconds(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "missing", lambda _: "")
    search = {"seconds": 60.0, "timeline": [[9.0, 300.0]], "winner": "bf16", "command": ["true"], "num_trials": 9}
    place.kept(rivals.PYTORCH_AUTOTUNE, lambda: search)
    place.kept(rivals.OURS, lambda: {**search, "seconds": 66.0})
    place.kept(rival.LONGER, lambda: search)
    assert met(rival.autotune_searches(place)) == {"seconds over the rival's": False}
    verified = {rivals.PLAIN: 100.0, rivals.OURS: 280.0, rival.LONGER: 320.0, rivals.PYTORCH_AUTOTUNE: 300.0}
    place.kept("verified", lambda: {name: [rate, rate] for name, rate in verified.items()})
    found = rival.winners_meet(place)
    assert met(found) == {"autotune over pytorch-autotune": False, "autotune, longer over pytorch-autotune": True}
    assert "autotune 2.80x" in found.evidence


def test_rival_checks_name_the_missing_package_or_search(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "missing", lambda _: f"not installed: {rivals.INSTALL}")
    with pytest.raises(Missing, match="pip install --no-deps pytorch-autotune"):
        rival.pytorch_autotune_searches(place)
    with pytest.raises(Missing, match="autotune has not searched yet"):
        rival.tpe_searches(place)
    with pytest.raises(Missing, match="fewer than two"):
        rival.winners_meet(place)


def test_largest_batch_is_predicted_from_two_small_ones(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_bytes = 40 * GIB
    monkeypatch.setattr(transformer, "host_facts", lambda: {"gpus": [{"memory_bytes": memory_bytes}]})
    monkeypatch.setattr(
        transformer, "recipe", lambda *_, **options: Table({}, limit_bytes=options["memory_limit_bytes"] or 1e18)
    )
    assert "at most 154 foreseen under 16.0 GiB; 142 ran" in transformer.frontier_is_foreseen(place).evidence
    assert met(transformer.memory_is_a_line(place)) == {"error of the memory foreseen": True}


def test_utilisation_is_the_share_of_the_maximum_flop_rate(place: Place) -> None:
    given(place, arithmetic={"flop_per_token": 1e9, "num_parameters": 124e6, "matmul_flop_per_s": 8e14})
    assert transformer.utilisation(4e5, place) == pytest.approx(0.5)
    assert "800.0 TFLOP/s" in transformer.arithmetic_is_counted(place).evidence


@pytest.mark.parametrize(("achieved", "is_met"), [(395.0, True), (380.0, False)])
def test_short_trials_may_differ_from_the_long_run_by_two_percent(
    place: Place, monkeypatch: pytest.MonkeyPatch, achieved: float, is_met: bool
) -> None:
    program = truth.PROGRAMS[0]
    monkeypatch.setattr(truth, "command", lambda *_: Table({}))
    place.kept(f"{program.title}: long", lambda: {"rate_per_s": achieved})
    assert met(truth.foretold(program, place)) == {"error": is_met}


def test_warm_starts_and_the_time_between_trials_are_judged_by_goals(place: Place) -> None:
    fresh = {"rate_per_s": [100.0, 101.0], "ready_s": [3.0, 3.0], "outside_s": [5.0, 5.0]}
    warmed = {"rate_per_s": [100.0, 101.0], "ready_s": [0.1, 0.1], "outside_s": [2.0, 2.0]}
    place.kept("warm, resnet18", lambda: [fresh, warmed])
    assert list(met(overhead.warm_beside_fresh("resnet18", place)).values()) == [True, True, False]
    given(place, study={"trials_s": 90.0, "whole_s": 100.0, "rows": [["between two trials", "1 s"]]})
    assert met(overhead.tuner_is_cheap(place)) == {"tuner, share of wall time": False}


def test_table_without_its_recording_is_not_overwritten(place: Place) -> None:
    workload = record.WORKLOADS[0]
    table = place.results / record.TABLES / f"{workload.name}.jsonl.gz"
    table.parent.mkdir()
    table.touch()
    with pytest.raises(Missing, match="it would be written over"):
        record.record(workload, 1.0, place)


def test_smoke_reports_what_tests_recorded_and_names_failed_tests(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ""

    def run(*words: str, **_: object) -> str:
        report = next(word for word in words if word.startswith("--junitxml=")).partition("=")[2]
        Path(report).write_text(XML.format(more=more))
        return ""

    monkeypatch.setattr(smoke, "run_command", run)
    found = smoke.run_tests(["tests/gpu"], place)
    assert found.evidence == "1 of 2 tests passed"
    assert "samples/s 10 -> 30" in found.detail
    assert "transformers is not installed" in found.detail
    more = '<testcase name="test_oom" time="2"><failure message="assert device_oom">no</failure></testcase>'
    with pytest.raises(AssertionError, match="1 of 3 failed: test_oom: assert device_oom"):
        smoke.run_tests(["tests/gpu"], place)


@pytest.mark.parametrize(
    ("planted", "cause", "gain", "is_met"),
    [
        ("copies", "synchronous copies", 0.4, True),
        ("copies", "launch-bound", 0.4, False),
        ("nothing", "launch-bound", 0.05, True),
        ("nothing", "launch-bound", 0.4, False),
    ],
)
def test_explaining_requires_the_planted_cause_and_no_large_gain_otherwise(
    place: Place, planted: str, cause: str, gain: float, is_met: bool
) -> None:
    finding = {"cause": cause, "where": "program.py:3", "gain": {"low": 0.0, "mid": gain, "high": 0.5}}
    told = {"document": {"explained": [{"findings": [finding]}]}, "report_bytes": 2048}
    place.kept(f"{planted}: rates", lambda: {"with": 100.0, "without": 150.0})
    place.kept(f"{planted}: explained", lambda: told)
    found = explaining.named(planted, place)
    assert list(met(found).values()) == [is_met]
    assert ("costs +50%" in found.evidence) == (planted == "copies")
    assert cause in found.detail
