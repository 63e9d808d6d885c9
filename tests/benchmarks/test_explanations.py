"""How `explanations` judges findings: made-up findings are compared with the planted programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import explanations, planted_truth
from tests.benchmarks.explanation_verdicts import Finding, Verdict, findings_of, report
from tests.benchmarks.planted_causes import CAUSES, FOLDER, HEALTHY, PAIRS, PROGRAMS, SINGLE, Cause, Program
from tests.benchmarks.planted_truth import Gain, Round, Run, Truths, gain, switches

PHOTOS, RIDGES, CLOUDS, LEAVES, TILES = (PROGRAMS[name] for name in ("photos", "ridges", "clouds", "leaves", "tiles"))


class Known:
    """Provides given gains instead of measured ones, by the causes that are switched off or by the setting."""

    def __init__(self, **ratios: float) -> None:
        self.ratios = ratios

    def gain(self, program: Program, switched_off: str) -> Gain | None:
        ratio = self.ratios.get(switched_off)
        return Gain(ratio=ratio, ci=(ratio - 0.05, ratio + 0.05)) if ratio else None

    def setting_gain(self, program: Program, setting: str) -> Gain | None:
        return self.gain(program, setting)


class Here(Program):
    """A program in a file of the test's own."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="made_up", causes=(Cause(kind="gc"),))
        object.__setattr__(self, "file", path)

    @property
    def path(self) -> Path:
        return self.file


def document(cause: str, where: Any, **gain: Any) -> dict[str, Any]:
    return {"cause": cause, "where": where, "evidence": "", "gain": gain, "basis": "", "remedy": {}, "check": None}


def judged(program: Program, *findings: dict[str, Any], **ratios: float) -> Verdict:
    return Verdict.of(program, Known(**ratios), findings_of({"explained": [{"findings": list(findings)}]}))


def place_of(program: Program, number: int = 0) -> str:
    return f"{program.path}:{program.line_ranges(program.causes[number])[0].start}"


def test_there_are_fourteen_single_causes_six_pairs_and_six_healthy_programs() -> None:
    assert len(SINGLE) == 14
    assert {program.causes[0].kind for program in SINGLE} == set(CAUSES)
    assert len(PAIRS) >= 6
    assert len(HEALTHY) == 6
    assert {program.path.name for program in PROGRAMS.values()} == {path.name for path in FOLDER.glob("*.py")} - {"meter.py"}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_planted_cause_has_its_place_and_its_switch_in_the_program(program: Program) -> None:
    source = program.path.read_text(encoding="utf-8")
    compile(source, str(program.path), "exec")
    assert set(re.findall(r'revision\("(\w)"\)', source)) == {cause.switch for cause in program.causes}
    for cause in program.causes:
        assert all(program.line_ranges(cause))
        assert cause.lines or cause.words
    assert not re.search(r"slow|wast|plant|bottleneck|expensive|cause|healthy|autotune", source, re.IGNORECASE)


def test_line_inside_the_planted_place_is_right_and_other_places_are_wrong() -> None:
    line = PHOTOS.line_ranges(PHOTOS.causes[0])[0].start
    for where in (f"photos.py:{line}", f"/somewhere/photos.py:{line} in open", {"file": "photos.py", "line": line}):
        assert judged(PHOTOS, document("slow decode", where)).is_first_and_right, where
    for where in (
        f"photos.py:{line + 1}",
        f"myphotos.py:{line}",
        f"photos.py:{line}7",
        "stage collate",
        "",
        None,
        f"photos.py:{line + 1} decode",
    ):
        assert not judged(PHOTOS, document("slow decode", where)).is_first_and_right, where


def test_a_range_of_lines_that_overlaps_the_place_is_right() -> None:
    line = PHOTOS.line_ranges(PHOTOS.causes[0])[0].start
    assert judged(PHOTOS, document("decode", f"photos.py:{line - 3}-{line}")).is_first_and_right
    assert not judged(PHOTOS, document("decode", f"photos.py:{line - 3}-{line - 1}")).is_first_and_right


def test_stage_or_rank_counts_as_a_place() -> None:
    assert judged(PHOTOS, document("slow decode", "stage decode")).is_first_and_right
    assert judged(CLOUDS, document("rank skew", {"rank": 1})).is_first_and_right
    assert judged(CLOUDS, document("rank skew", "rank 1, clouds.py:59")).is_first_and_right
    assert not judged(CLOUDS, document("rank skew", "rank 0")).is_first_and_right


@pytest.mark.parametrize("cause", ["storage", "too few workers", "memory-bound operators", "graph breaks", "decoder"])
def test_another_cause_is_not_taken_for_the_planted_one(cause: str) -> None:
    assert judged(PHOTOS, document(cause, place_of(PHOTOS))).judged[0].finding is None


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("residuals", ".item() in the step"), ("journal", "logging in the step"), ("contrast", "Python in the step"),
        ("ledger", "gc in the step"), ("gates", "launch-bound"), ("lengths", "recompilation"), ("clouds", "rank skew"),
        ("tiles", "fp32 where bf16 units idle"), ("towers", "unfused optimizer"), ("archive", "input.storage"),
        ("spectra", "too few workers"), ("sentences", "slow_collate"), ("textures", "augmentation"),
    ],
)  # fmt: skip
def test_each_spelling_of_a_cause_matches_exactly_one_planted_cause(name: str, cause: str) -> None:
    program = PROGRAMS[name]
    assert Finding(cause=cause).is_of(program.causes[0])
    others = [other for other in SINGLE if Finding(cause=cause).is_of(other.causes[0])]
    assert others == [program]


def test_cause_found_second_counts_as_found_but_not_as_first() -> None:
    verdict = judged(PHOTOS, document("collate", "", mid=0.5), document("decode", "decode", mid=0.4), A=1.4)
    assert verdict.judged[0].place == 2
    assert not verdict.is_first_and_right
    assert verdict.are_all_early


def test_interval_holds_gains_up_to_its_upper_end_and_may_lack_a_lower_end() -> None:
    assert Finding(cause="x", low=0.2, mid=0.3, high=0.4, kind="predicted").holds(0.4)
    assert not Finding(cause="x", low=0.2, mid=0.3, high=0.4, kind="predicted").holds(0.41)
    assert Finding(cause="x", high=0.4, kind="bound").holds(0.1)
    assert not Finding(cause="x", high=0.4, kind="bound").holds(0.5)


def test_floor_may_exceed_the_measured_gain_by_at_most_three_points() -> None:
    floor = Finding(cause="x", low=0.2, mid=0.2, high=0.25, kind="floor")
    assert floor.holds(2.0)
    assert floor.holds(0.171)
    assert not floor.holds(0.169)
    assert judged(PHOTOS, document("decode", "decode", low=0.5, kind="floor"), A=1.4).judged[0].is_floor_too_high


def test_finding_is_near_if_its_middle_is_within_a_quarter_of_the_gain() -> None:
    assert Finding(cause="x", mid=0.5).is_near(0.4)
    assert not Finding(cause="x", mid=0.51).is_near(0.4)
    assert not Finding(cause="x", low=0.3, high=0.5).is_near(0.4)


def test_gain_of_a_setting_is_compared_with_that_setting_and_not_with_removing_the_cause() -> None:
    bf16 = document("32-bit arithmetic", "conv2d", low=0.5, mid=0.6, high=0.7, kind="measured")
    bf16["remedy"] = {"knob": "precision.amp", "value": "bf16"}
    verdict = judged(TILES, bf16, **{"A": 2.0, "precision.amp=bf16": 1.6})
    assert verdict.judged[0].is_inside
    assert verdict.judged[0].is_near
    assert not verdict.judged[0].is_inside_planted
    assert not verdict.judged[0].is_near_planted
    assert "precision.amp=bf16: 1.60x" in verdict.rows()[0][6]
    unknown = judged(TILES, bf16, A=1.6).judged[0]  # the setting was not measured
    assert not unknown.is_inside
    code = judged(TILES, document("32-bit arithmetic", "conv2d", low=0.5, mid=0.6, high=0.7), A=1.6).judged[0]
    assert code.is_inside


def test_pair_counts_only_if_both_causes_are_among_the_first_three_findings() -> None:
    other, item = document("graph breaks", ""), document("item", place_of(RIDGES))
    optimizer = document("unfused optimizer", place_of(RIDGES, 1))
    assert judged(RIDGES, item, other, optimizer).are_all_early
    assert not judged(RIDGES, item, other, other, optimizer).are_all_early
    assert not judged(RIDGES, item, other).are_all_early


def test_only_large_findings_in_a_healthy_program_count_as_false() -> None:
    assert not judged(LEAVES, document("decode", "", low=0.0, mid=0.05, high=0.2)).false_findings
    assert len(judged(LEAVES, document("decode", "", mid=0.1), document("gc", "", low=0.3)).false_findings) == 2


def test_goals_are_reached_if_every_cause_is_found_with_the_right_gain() -> None:
    sized = {"low": 0.3, "mid": 0.4, "high": 0.5, "kind": "predicted"}
    verdicts = [judged(each, document(CAUSES[each.causes[0].kind][0], _place(each), **sized), A=1.4) for each in SINGLE]
    verdicts += [judged(each, *(document(CAUSES[cause.kind][0], "") for cause in each.causes)) for each in PAIRS]
    text, is_reached = report([*verdicts, *(judged(each) for each in HEALTHY)])
    assert is_reached, text
    assert re.search(r"cause first, place right +14 of 14 +goal at least 13: reached", text)
    assert "photos" in text
    assert "+40% [+30%, +50%] predicted" in text
    assert "1.40x [1.35, 1.45]" in text


def _place(program: Program) -> str:
    return program.causes[0].words[0] if program.causes[0].words else place_of(program)


def test_unexplained_programs_are_named_and_miss_the_goal() -> None:
    text, is_reached = report([Verdict.of(each, Known(A=1.4), None) for each in (PHOTOS, LEAVES)])
    assert not is_reached
    assert "not explained: photos, leaves" in text


def test_report_marks_a_missed_goal() -> None:
    text, is_reached = report([judged(LEAVES, document("decode", "", mid=0.4))])
    assert not is_reached
    assert re.search(r"findings of 10 % in healthy +1 +goal none: MISSED", text)


def test_causes_of_a_pair_are_switched_off_one_by_one_and_together() -> None:
    assert switches(PHOTOS) == ["", "A"]
    assert switches(RIDGES) == ["", "A", "B", "AB"]
    assert switches(LEAVES) == [""]
    rounds = [Round(rates={"": 10.0, "A": 14.0, "B": other}) for other in (10.0, 11.0)]
    assert gain(rounds, "A").ratio == pytest.approx(1.4)
    assert gain(rounds[:1], "A").ci is None


def test_measured_costs_are_stored_and_not_measured_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def undisturbed(run: Run, *, attempts: int) -> tuple[float, float]:
        runs.append(run.off)
        return (14.0 if run.off else 10.0), 0.0

    monkeypatch.setattr(planted_truth, "undisturbed", undisturbed)
    Truths(tmp_path / "truths.json").measure(PHOTOS, tmp_path, num_pairs=2)
    assert runs == ["", "A", "A", ""]
    again = Truths(tmp_path / "truths.json")
    again.measure(PHOTOS, tmp_path, num_pairs=2)
    assert len(runs) == 4
    assert again.gain(PHOTOS, "A") == Gain(ratio=pytest.approx(1.4), ci=pytest.approx((1.4, 1.4)))
    again.measure(PHOTOS, tmp_path, num_pairs=3)
    assert len(runs) == 6


def test_program_that_cannot_run_gets_no_cost_and_the_others_are_still_measured(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def own_rate(run: Run) -> float:
        if run.program.name == "photos":
            raise RuntimeError("photos printed no rate: could not create a primitive")
        return 20.0 if run.off else 10.0

    monkeypatch.setattr(Run, "own_rate", own_rate)
    monkeypatch.setattr(explanations.planted_data, "prepare", lambda folder: None)
    monkeypatch.setattr(explanations, "Truths", lambda **options: Truths(tmp_path / "truths.json", **options))
    words = ["--only", "photos", "archive", "--pairs", "1", "--attempts", "1", "--truth-only", "--folder", str(tmp_path)]
    assert explanations.main(words) == 0
    printed = capsys.readouterr()
    assert "photos printed no rate" in printed.err
    kept = Truths(tmp_path / "truths.json")
    absent, gain = (kept.gain(program, "A") for program in (PHOTOS, PROGRAMS["archive"]))
    assert absent is None
    assert gain is not None
    assert (gain.ratio, gain.ci) == (2.0, None)  # whether it was disturbed depends on what else runs here
    assert "2.00x" in printed.out


@pytest.mark.thorough  # six new processes with torch; whether a setting took effect is also tested below
def test_rates_with_a_setting_are_measured_under_apply_and_kept_beside_the_costs(tmp_path: Any) -> None:
    program = tmp_path / "program.py"  # it prints a rate and the settings that it trains with
    program.write_text(
        "import argparse, json, torch\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--data'); parser.add_argument('--seconds')\n"
        "parser.parse_args()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(4, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "fused = bool(optimizer.param_groups[0]['fused'])\n"
        "print(json.dumps({'rate_per_s': 20.0 if fused else 10.0}))\n"
    )
    study = tmp_path / "study"
    study.mkdir()
    (study / "best.yaml").write_text("provenance: {study: made-up}\nloader: {num_workers: 4}\n")
    made_up = Here(program)
    truths = Truths(tmp_path / "truths.json", attempts=1)
    truths.add(made_up, Round(rates={"": 10.0, "A": 14.0}))
    truths.measure_setting(made_up, tmp_path, "optimizer.implementation=fused", study=study, num_pairs=2)
    kept = Truths(tmp_path / "truths.json")
    assert kept.setting_gain(made_up, "optimizer.implementation=fused").ratio == pytest.approx(2.0)
    assert kept.setting_gain(made_up, "optimizer.implementation=foreach") is None
    assert kept.gain(made_up, "A").ratio == pytest.approx(1.4)


def test_setting_that_does_not_take_effect_gets_no_rate(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('{\"rate_per_s\": 10.0}')\n")
    (tmp_path / "best.yaml").write_text("provenance: {study: made-up}\n")
    truths = Truths(tmp_path / "truths.json", attempts=1)
    with pytest.raises(RuntimeError, match="the setting was not applied"):
        truths.measure_setting(Here(program), tmp_path, "optimizer.implementation=fused", study=tmp_path, num_pairs=1)


def test_costs_of_another_machine_or_an_older_program_version_are_ignored(tmp_path: Any) -> None:
    truths = Truths(tmp_path / "truths.json")
    truths.add(PHOTOS, Round(rates={"": 10.0, "A": 14.0}))
    kept = json.loads(truths.path.read_text())
    truths.path.write_text(json.dumps({"another": kept[truths.machine]}))
    another = Truths(truths.path)
    assert another.gain(PHOTOS, "A") is None
    another.add(PHOTOS, Round(rates={"": 10.0, "A": 15.0}))
    assert set(json.loads(truths.path.read_text())) == {"another", truths.machine}
    kept[truths.machine]["photos"]["source"] = "older"
    truths.path.write_text(json.dumps(kept))
    assert Truths(truths.path).gain(PHOTOS, "A") is None


def test_disturbed_rounds_are_marked_and_can_be_left_out(tmp_path: Any) -> None:
    truths = Truths(tmp_path / "truths.json")
    for foreign in (0.0, 0.9):
        truths.add(PHOTOS, Round(rates={"": 10.0, "A": 14.0}, foreign_cores=foreign))
    assert str(truths.gain(PHOTOS, "A")) == "1.40x [1.40, 1.40] disturbed"
    calm = Truths(truths.path, is_calm=True)
    assert str(calm.gain(PHOTOS, "A")) == "1.40x"
    calm.add(PHOTOS, Round(rates={"": 10.0, "A": 14.0}))
    assert not Truths(truths.path).gain(PHOTOS, "A").is_disturbed
