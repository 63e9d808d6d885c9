"""The contents of a report, read from its HTML."""

import dataclasses
import html
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.cli.main import main
from autotune.quantities import seconds_text
from autotune.records import CHOOSING, REPORTED
from autotune.report.drawing import Scale, bar, breakable, inline_code, powers_of_two, round_values, tied
from autotune.report.figures.machine import _foreign
from autotune.report.figures.memory import _capacity_bytes
from autotune.report.figures.spent import _placed
from autotune.report.page import page
from autotune.report.study import Study, read
from autotune.run_dir import StudyFolder
from tests.report import made
from tests.support.studies import make_study


@pytest.fixture
def folder(tmp_path):
    return make_study(tmp_path / "runs")


def text_of(page_html: str) -> str:
    """Returns the text that a reader sees, without tags, styles and hidden titles."""
    body = re.sub(r"<style>.*?</style>|<title>.*?</title>", "", page_html, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def page_of(folder: StudyFolder, **changes) -> str:
    return page([read(folder, {**folder.read_summary(), **changes})])


@pytest.fixture(scope="session")
def whole(complete):
    return page_of(complete)


def part(page_html: str, key: str) -> str:
    """Returns the text of a figure, or of the line that says why the figure is absent."""
    pattern = rf'<figure id="{key}".*?</figure>|<li>(?:(?!</li>).)*?<b id="{key}">.*?</li>'
    found = re.search(pattern, page_html, flags=re.DOTALL)
    assert found, key
    return text_of(found[0])


def test_report_begins_with_gain_cost_and_next_step(complete, whole):
    summary = complete.read_summary()
    first = text_of(re.search(r'<dl class="first">.*?</dl>', whole, flags=re.DOTALL)[0])
    gained, cost, then = (first.index(word) for word in ("Gained", "Cost", "Next"))
    assert gained < cost < then
    low, high = summary["speedup"]["ci"]
    assert f"faster: {summary['speedup']['ratio']:.2f}x [{low:.2f}, {high:.2f}]" in first[gained:cost]
    assert f"from {summary['speedup']['num_rounds']} pairs of fresh processes" in first[gained:cost]
    assert "bf16" in first[cost:then]
    assert "pays off if the unchanged training takes more than" in first[cost:then]
    assert "autotune export s" in first[then:]


def test_every_figure_is_present_or_its_absence_is_explained(whole):
    keys = re.findall(r'<figure id="([\w-]+)"', whole)
    assert keys == [
        "rates", "changes", "findings", "baseline-findings", "use", "breakdown", "categories", "stages", "operators",
        "timeline", "fastest", "trials", "settings", "failures", "memory-by-batch", "memory", "memory-timeline",
        "method", "quiet", "study-timeline", "environment",
    ]  # fmt: skip
    assert re.findall(r'<b id="([\w-]+)"', whole) == ["kernels", "ranks"]
    assert 'class="absent"><figcaption>' not in whole
    assert "the program ran on the CPU" in part(whole, "kernels")
    assert "One process trains" in part(whole, "ranks")


def test_no_figure_fails_to_be_drawn(whole):
    assert "cannot be drawn" not in whole
    assert not re.search(r'="(nan|inf|-inf)', whole)


def test_findings_state_place_remedy_and_gain(whole):
    said = part(whole, "findings")
    assert "Python in the step" in said
    assert "train.py:12" in said
    assert re.search(r"at least \+\d+ %, about \+\d+ %", said)
    assert "replace the loop with tensor operations" in said


def test_checked_finding_shows_predicted_and_measured_gain(folder):
    summary = folder.read_summary()
    gains = [
        {"low": 0.30, "mid": 0.38, "high": 0.47, "kind": "predicted"},
        {"low": 0.36, "mid": 0.41, "high": 0.46, "kind": "measured"},
    ]
    check = {"trial": 5, "cause": "too few workers", "where": "loader", "remedy": "loader.num_workers=2",
             "predicted": gains[0], "measured": gains[1], "how": "pairs", "num_pairs": 2, "held": True}  # fmt: skip
    finding = {"cause": "too few workers", "where": "loader", "evidence": "1 worker", "gain": gains[1], "basis": "2 pairs",
               "remedy": {"knob": "loader.num_workers", "value": 2}, "check": check}  # fmt: skip
    entry = {
        "trial": 5,
        "role": "best",
        "passes": {},
        "phases_s": {"input": 0.03, "forward": 0.07},
        "findings": [finding],
        "notes": [],
    }
    document = {"explained": [entry], "checks": [check], "accuracy": {"checked": 1, "held": 1}, "skipped": ""}
    said = page_of(folder, explanation=document)
    assert "predicted +38 % [30, 47]" in part(said, "findings")
    assert "measured +41 % [36, 46]" in part(said, "findings")
    assert "1 of 1 predicted gain held" in part(said, "findings")
    assert summary["best"]["trial"] == 5
    assert "waiting for input" in part(said, "breakdown")


def test_operator_shares_refer_to_the_whole_step(whole):
    said = part(whole, "operators")
    assert "Shares are of a whole step, which takes 100 ms under the profiler." in said
    assert re.search(r"aten::mm .*40.0.ms, 40\.0.%", said), "40 ms of a step of 100 ms, though no other operator takes time"


def test_changes_without_a_measured_effect_share_a_row(folder):
    entries = folder.read_summary()["attribution"]
    assert len(entries) > 2
    unknown = [{**one, "ratio": None, "ci": None, "verdict": "not measured", "reason": ""} for one in entries[1:]]
    drawn = part(page_of(folder, attribution=[entries[0], *unknown], minimality=None), "changes").split("The numbers")[0]
    assert drawn.count("not measured") == 1


def test_effect_that_is_not_known_is_not_called_measured(folder):
    numbers = part(page_of(folder, attribution=[], minimality=None), "changes").split("The numbers")[1]
    num = len(folder.read_summary()["best"]["overrides"])
    assert num > 1
    assert numbers.count("measured") == numbers.count("not measured") == num


def test_values_that_were_tried_and_not_kept_are_named_below_the_effects(tmp_path):
    said = part(page_of(make_study(tmp_path / "runs")), "changes")
    assert "Tried, not kept: batch 128 0.39x, batch 4096 host_oom, compile default timeout (each the fastest trial with" in said


def test_rates_of_step_and_loader_come_from_the_finals_and_name_their_source(folder):
    summary = folder.read_summary()
    trials = [*summary["trials"], {**summary["trials"][6], "number": 8}, {**summary["trials"][6], "number": 9}]
    for number, rate in ((0, 38.7), (6, 410.0), (8, 420.0), (9, 600.0)):
        trials[number] = {**trials[number], "loader_rate": rate}
    said = part(page_of(folder, trials=trials), "stages")
    assert "L, the loader alone 420 → 118 samples/s" in said
    assert "Unchanged: medians of 3 processes of the finals." in said
    assert "Best: rates of trial 0007 alone in the finals." in said
    said = part(page_of(folder, trials=trials[:6]), "stages")
    assert "L, the loader alone 38.7 → 118 samples/s" in said
    assert "Unchanged: rates of trial 0000 alone." in said


@pytest.mark.parametrize(
    ("outcome", "phases_s", "words"),
    [
        ("ok", {"forward": 0.1}, "No known cause costs 3 % or more in what was recorded so far;"),
        ("timeout", {}, "Not known, because no pass timed the steps."),
    ],
)
def test_absence_of_findings_is_good_news_only_if_a_pass_succeeded(tmp_path, outcome, phases_s, words):
    passes = {"lines": {"trial": 6, "outcome": outcome, "reason": "it took too long"}}
    entry = {"trial": 5, "role": "best", "passes": passes, "phases_s": phases_s, "findings": [], "notes": ["lines: see above"]}
    explanation = {"explained": [entry], "checks": [], "accuracy": {"checked": 0, "held": 0}, "skipped": ""}
    said = part(page_of(make_study(tmp_path / "runs"), explanation=explanation), "findings")
    assert words in said
    assert "Lines: see above" in said


def test_code_to_paste_is_given_in_every_format(whole):
    for name in ("python", "yaml", "env", "hf", "lightning", "accelerate", "deepspeed"):
        assert f"<b>{name}</b>" in whole
    assert "precision:" in whole
    assert "return torch.autocast(device_type, dtype=torch.bfloat16" in whole


def test_trials_that_ran_out_of_memory_are_named_with_their_batch_size(complete, whole):
    said = part(whole, "memory-by-batch")
    out = [trial for trial in complete.read_trials() if trial.outcome.is_memory]
    assert out
    assert f"{len(out)} trial" in said
    assert "ran out of memory" in said
    assert f"{out[0].number:04d}" in part(whole, "failures")
    assert said.count(f"{out[0].number:04d} 128") == 1


def test_trials_that_ran_out_of_memory_are_named_even_if_no_batch_size_is_known(folder):
    trials = [{**trial, "knobs": {}} for trial in folder.read_summary()["trials"]]
    said = part(page_of(folder, trials=trials), "memory-by-batch")
    assert "1 trial ran out of memory: trial 3 (batch 4096)." in said
    assert "No configuration" not in said


def test_configuration_that_ran_out_of_memory_only_in_the_finals_is_named(folder):
    trials = [trial for trial in folder.read_summary()["trials"] if trial["number"] != 3]
    trials[-1] |= {"outcome": "device_oom", "value": None, "ci": None, "peak_memory_bytes": None}
    assert "1 trial ran out of memory: trial 7 (finals: 0005 again)." in part(page_of(folder, trials=trials), "memory-by-batch")


@pytest.mark.parametrize(
    ("limit", "share"), [("8GiB", 1 / 3), (0.5, 1 / 2), (2**30, 1 / 24), (None, 1), ("no limit", 1), ("32GiB", 1)]
)
def test_memory_capacity_is_the_configured_limit_within_the_machine_memory(limit, share):
    summary = {"machine": {"memory_bytes": 24 * 2**30}, "identity": {"device.memory_limit": limit}}
    assert _capacity_bytes(Study(folder=StudyFolder(Path("s")), summary=summary)) == share * 24 * 2**30


def test_fastest_configurations_are_listed_with_rates_and_step_times(complete, whole):
    summary, said = complete.read_summary(), part(whole, "fastest")
    low, high = summary["speedup"]["ci"]
    best = f"{summary['best']['trial']:04d}, best bf16 · batch 64 · workers 2"
    assert re.search(
        rf"{best} \d+ samples/s {summary['speedup']['ratio']:.2f}x \[{low:.2f}, {high:.2f}\] \d+ in the finals", said
    )
    assert "1 in the search" in said
    assert said.index(best) < said.index("0000 unchanged")
    assert "100 ms 100 ms Some processes of the finals served to choose the best" in said


def again(trials, number, of, **changes):
    """Returns the summary's entry of a trial of the finals that measures the trial `of` again."""
    return {**trials[of], "number": number, "kind": "final", "repeats": of, "why": REPORTED, **changes}


def test_fastest_list_says_what_each_process_of_the_finals_counts_for(folder):
    first = folder.read_summary()["trials"][:6]
    lost = {"value": None, "ci": None, "outcome": "disturbed", "reason": "other programs used 0.65 of 2 cores"}
    finals = [
        again(first, 6, 1, round=1, why=CHOOSING, **lost), again(first, 7, 5, round=1, why=CHOOSING),
        again(first, 8, 0, round=2), again(first, 9, 5, round=2),
        again(first, 10, 5, round=3), again(first, 11, 0, round=3),
        again(first, 12, 5, round=4), again(first, 13, 0, round=4, **lost),
    ]  # fmt: skip
    said = part(page_of(folder, trials=[*first, *finals]), "fastest")
    assert "4 in the finals: 2 in pairs, 1 to choose, 1 without a partner" in said
    assert "2 in the finals; 1 in the finals, disturbed" in said  # the baseline
    assert "1 in the search; 1 in the finals, disturbed" in said
    assert "served to choose the best of the finalists. The ratio comes only from the pairs" in said
    why = "gave no result: disturbed (other programs used 0.65 of 2 cores)"
    assert f"0006, which measured 0001 again in the finals, {why}, so the rate of 0001 is that of its first" in said
    assert f"0013, which measured 0000 again in the finals, {why}." in said
    assert "0012, which measured 0005 again in the finals, does not count, because the other trial of its round" in said


def test_best_trial_from_the_attribution_is_shown_like_any_other(folder):
    summary = folder.read_summary()
    winner = {**summary["trials"][1], "number": 8, "kind": "attribution", "knobs": summary["trials"][1]["knobs"]}
    finals = [again([*summary["trials"], winner], number, 8, round=number) for number in (9, 10)]
    best = {**summary["best"], "trial": 8, "overrides": winner["changed"]}
    said = page_of(folder, trials=[*summary["trials"], winner, *finals], best=best)
    assert "0008, best bf16 · channels_last 40.6 samples/s 2.41x [2.36, 2.46] 2 in the finals" in part(said, "fastest")
    for key in ("settings", "trials", "memory-by-batch"):
        figure = re.search(rf'<figure id="{key}".*?</figure>', said, flags=re.DOTALL)[0]
        assert len(re.findall(r'class="best"', figure)) >= 2, key  # a mark besides the one in the legend


def test_every_counted_process_has_a_mark(folder):
    trials = folder.read_summary()["trials"]
    parity = [{**trials[0], "number": n, "kind": "parity", "value": None, "ci": None, "reason": "within 0.1 %"} for n in (8, 9)]
    kinds = {"explain": {"kind": "explain", "value": None}, "check": {"kind": "check"}}
    others = [{**trials[0], "number": n, **kind} for n, kind in enumerate(kinds.values(), 10)]
    said = page_of(folder, trials=[*trials, *parity, *others])
    figure = re.search(r'<figure id="trials".*?</figure>', said, flags=re.DOTALL)[0]
    titles = re.findall(r"<title>(\d{4})  (.*?)</title>", html.unescape(figure))
    assert [int(number) for number, _ in titles] == list(range(10))
    assert titles[8][1] == "losses of the baseline: ok (within 0.1 %)"
    assert "losses compared" in text_of(figure)
    assert "no result" in text_of(figure)


def test_report_says_that_each_memory_peak_comes_from_one_process(whole):
    assert "at the peak, from one process each" in text_of(whole.split("</dl>")[0])
    assert "Each mark is the peak of one process." in part(whole, "memory-by-batch")
    assert "Memory and step times come from one process each." in part(whole, "fastest")


@pytest.mark.parametrize(
    ("bases", "words"),
    [
        (
            ("measured", "measured"),
            ["Effects measured by trials with and without the change, side by side: bf16 · channels_last."],
        ),
        (("estimated", "estimated"), ["Effects estimated from all trials of the study: bf16 · channels_last."]),
        (("estimated", "measured"), ["side by side: channels_last.", "Effects estimated from all trials of the study: bf16."]),
    ],
)
def test_method_section_says_how_the_effects_were_determined(folder, bases, words):
    entries = [{**one, "basis": basis} for one, basis in zip(folder.read_summary()["attribution"], bases, strict=False)]
    said = part(page_of(folder, attribution=entries, minimality=None), "method")
    for each in words:
        assert each in said
    assert ("measured by trials with" in said, "estimated from all" in said) == ("measured" in bases, "estimated" in bases)


def test_numbers_in_a_record_that_are_not_finite_are_left_out(folder):
    for record in folder.read_trials():
        folder.write_trial(dataclasses.replace(record, metrics={**record.metrics, "step_p50_s": float("nan")}))
    said = page_of(folder)
    assert not re.search(r"\bnan\b", text_of(said))
    assert "a step, median" not in said


def test_settings_list_tried_values_with_their_fastest_trial_and_untried_values(tmp_path, whole):
    assert "workers 0 loader.num_workers" in part(whole, "settings")
    assert "batch 128 no result in 4" in part(whole, "settings")
    assert "loader.batch_size 128 4 4 - -" in part(whole, "settings")
    folder = make_study(tmp_path / "runs")
    record = folder.read_study()
    record.space["loader.num_workers"] = {"choice": [0, 2]}
    for name in ("loader.prefetch_factor", "threads.intra"):
        record.space[name] = {"choice": [2, 4]}
    folder.write_study(record)
    trials = [{**trial, "knobs": {**trial["knobs"], "threads.intra": 2}} for trial in folder.read_summary()["trials"]]
    said = part(page_of(folder, trials=trials), "settings")
    assert "batch 16 loader.batch_size not tried" in said
    assert "tried with one value only: loader.prefetch_factor (has no effect in these trials), threads.intra (2)." in said


def test_machine_use_lists_step_time_cores_and_arithmetic(whole):
    said = part(whole, "use")
    assert "a step, median 100 ms 100 ms" in said
    assert "CPU cores in use 2.00 of 4 2.00 of 4" in said
    assert re.search(r"arithmetic [\d.]+ [MGT]FLOP/s", said)


def test_gpu_measurements_are_shown_for_baseline_best_and_fastest_trials(folder):
    for record in folder.read_trials():
        if record.number in (0, 5):
            numbers = {"gpu.utilisation_frac": 0.25 + record.number / 10, "gpu.power_w": 300.0, "gpu.energy_per_sample_j": 0.5}
            folder.write_trial(dataclasses.replace(record, metrics={**record.metrics, **numbers}))
    said, listed = (part(page_of(folder), key) for key in ("use", "fastest"))
    assert "GPU in use, as nvidia-smi counts it 25.0 % 75.0 %" in said.replace("\xa0", " ")
    assert "power of the GPU 300 W 300 W" in said
    assert "energy of the GPU per sample 0.500 J 0.500 J" in said
    assert "GPU in use" in listed
    assert listed.replace("\xa0", " ").endswith("25.0 %")


def test_figures_that_are_absent_for_the_same_reason_share_one_line(tmp_path):
    said = page_of(make_study(tmp_path / "runs"))
    line = part(said, "breakdown")
    assert line == part(said, "operators") == part(said, "timeline")
    assert "Where does the time of a step go? What is a step made of? Which operators" in line
    assert line.count("autotune explain resnet18") == 1


def test_links_at_the_top_lead_to_every_part(tmp_path, whole):
    two = page([read(one, one.read_summary()) for one in (make_study(tmp_path / "runs"), make_study(tmp_path / "runs", "b"))])
    for said, num in ((whole, 6), (two, 3)):
        places = re.findall(r'<a href="#([\w-]+)">', said)
        assert len(places) == num
        assert set(places) <= set(re.findall(r'\bid="([\w-]+)"', said))


def test_the_time_of_a_study_adds_up(complete, whole):
    seconds = complete.read_summary()["seconds"]
    rest = seconds["total"] - sum(seconds[name] for name in ("measuring", "starting", "compiling", "lost"))
    assert rest > 1
    assert f"the rest {seconds_text(rest)} (warm-up, " in part(whole, "study-timeline")


def test_pause_begins_when_the_last_trial_on_any_slot_ends():
    trials = [SimpleNamespace(started_at=1000.0 + start, seconds=seconds) for start, seconds in ((0, 600), (10, 50), (610, 20))]
    assert [start for start, _ in _placed(trials)] == [0, 10, 610]
    late = [*trials, SimpleNamespace(started_at=5000.0, seconds=20)]
    assert [start for start, _ in _placed(late)] == [0, 10, 610, 630], "a pause after all trials is still cut out"


@pytest.mark.parametrize(
    ("cores", "foreign_cores", "word"), [(64, 0.5, "Yes"), (64, 0.7, "Not always"), (2, 0.5, "Not always")]
)
def test_large_machine_is_quiet_with_as_much_other_work_as_no_trial_is_disturbed_by(cores, foreign_cores, word):
    record = SimpleNamespace(metrics={"host.foreign_cores": foreign_cores})
    (said,) = _foreign([record], SimpleNamespace(summary={"machine": {"num_cores": cores}}))
    assert said.startswith(word)


def test_breakdown_shows_baseline_and_best(whole):
    said = part(whole, "breakdown")
    assert "unchanged: 100 ms, best: 100 ms" in said
    assert "→" in said


def test_numbers_that_are_not_finite_are_not_drawn(folder):
    trials = [
        {**trial, "value": float("nan"), "ci": [float("-inf"), float("inf")]} for trial in folder.read_summary()["trials"]
    ]
    said = page_of(folder, trials=trials, speedup={"ratio": float("inf"), "ci": None, "verdict": "ambiguous", "reason": ""})
    assert not re.search(r'="(nan|inf|-inf)', said)
    assert "No trial has a rate" in said


def test_damaged_part_of_a_summary_affects_only_its_own_figure(folder):
    said = page_of(folder, attribution=[{"knob": "precision.amp"}, 3], machine={"gpus": 7})
    assert "cannot be drawn from the files of this study" in part(said, "changes")
    assert "2.41x" in part(said, "rates")


@pytest.mark.parametrize("status", ["interrupted", "failed", "running"])
def test_a_study_without_a_verdict_has_a_report(tmp_path, status):
    folder = make_study(tmp_path / "runs", status=status, num_trials=3)
    said = text_of(page_of(folder, reason="because"))
    assert f"{status}: because" in said
    assert "Nothing: there is no faster configuration to hand over." in said


def test_report_of_an_interrupted_study_says_how_to_continue(tmp_path):
    folder = make_study(tmp_path / "runs", status="interrupted", num_trials=3)
    first = text_of(page_of(folder).split("</dl>")[0])
    assert "continue the study, which ended early" in first
    assert "autotune resume resnet18" in first


def test_report_of_a_study_without_a_comparison_asks_for_more_time(tmp_path):
    folder = make_study(tmp_path / "runs", num_trials=1)
    changes = {"best": None, "speedup": None, "attribution": [], "minimality": None}
    first = text_of(page_of(folder, **changes).split("</dl>")[0])
    assert "give the study more time" in first
    assert "autotune resume resnet18" in first
    assert "study.budget.minutes=16" in first


def test_report_of_a_study_with_a_limited_number_of_trials_asks_for_more_trials(tmp_path):
    folder = make_study(tmp_path / "runs", num_trials=1)
    changes = {"best": None, "speedup": None, "attribution": [], "minimality": None, "budget_s": None, "budget_trials": 1}
    assert "study.budget.trials=2" in text_of(page_of(folder, **changes).split("</dl>")[0])
    assert "keep the program as it is" in text_of(page_of(folder, **changes | {"budget_trials": None}).split("</dl>")[0])


def test_report_of_a_running_study_says_to_wait_and_proposes_no_command(tmp_path):
    folder = make_study(tmp_path / "runs", status="running", num_trials=3)
    first = text_of(page_of(folder).split("</dl>")[0])
    following = first.partition(" Next ")[2]
    assert following.startswith("wait: the study is still running")
    assert "autotune " not in following


def test_kept_baseline_whose_rival_was_slower_has_no_ratio_in_doubt(folder):
    best = {**folder.read_summary()["baseline"], "overrides": {}}
    kept = {"ratio": 1.0, "ci": None, "verdict": "same", "reason": "the finalist was worse", "num_rounds": 4}
    for speedup, is_doubted in ((kept, False), ({**kept, "num_rounds": 1, "trial": 5, "overrides": {"a": 1}}, True)):
        said = part(page_of(folder, speedup=speedup, best=best, attribution=[], minimality=None), "rates")
        assert ("the uncertainty of the ratio is unknown" in said) is is_doubted


@pytest.mark.parametrize(("verdict", "run"), [("passed", 8), ("not checked", 8), ("not needed", None)])
def test_losses_of_the_best_count_as_compared_only_if_they_were(folder, verdict, run):
    trials = folder.read_summary()["trials"]
    parity = {**trials[0], "number": 8, "kind": "parity", "value": None, "ci": None}
    found = {"verdict": verdict, "text": "within 0.1 %", "trial": run}
    said = part(page_of(folder, trials=[*trials, parity], parity=found), "method")
    assert ("The losses of the first steps of the best were compared" in said) is (verdict == "passed")


def test_report_of_a_thousand_trials_is_smaller_than_a_megabyte(tmp_path):
    folder = made.large(tmp_path / "runs", 1000)
    size = len(page_of(folder).encode())
    assert 200_000 < size < 1_000_000


def test_rows_that_are_left_out_are_counted(tmp_path):
    folder = made.large(tmp_path / "runs", 1510)
    said = page_of(folder)
    assert "10 more rows are not in this file" in said
    assert len(said.encode()) < 1_300_000


def test_comparison_of_two_studies_says_what_differs(tmp_path):
    one, two = make_study(tmp_path / "runs"), make_study(tmp_path / "runs", "other")
    first, second = (
        {**folder.read_summary(), "identity": {"machine.cpu_model": model}} for folder, model in ((one, "A"), (two, "B"))
    )
    second["speedup"] = {"ratio": 1.2, "ci": [1.1, 1.3], "verdict": "faster", "reason": ""}
    said = page([read(one, first), read(two, second)])
    assert "machine.cpu_model: was 'A', is 'B'" in html.unescape(said)
    assert "2.41x [2.36, 2.46]" in part(said, "beside-rates")
    assert "1.20x [1.10, 1.30]" in part(said, "beside-rates")
    ids = re.findall(r'\bid="([^"]+)"', said)
    assert len(ids) == len(set(ids))


def test_comparison_names_the_study_that_kept_its_baseline(tmp_path):
    folders = [make_study(tmp_path / "runs"), make_study(tmp_path / "runs", "other")]
    kept = []
    for folder, words in zip(folders, ("bf16", "fp16"), strict=True):
        summary = folder.read_summary()
        lost = {"ratio": 0.9, "ci": [0.5, 1.5], "verdict": "ambiguous", "reason": "", "overrides": {"precision.amp": words}}
        summary |= {"speedup": lost, "attribution": [], "minimality": None, "best": {**summary["baseline"], "overrides": {}}}
        kept.append(read(folder, summary))
    said = page(kept)
    assert "other: The baseline was kept. It was compared with: fp16." in part(said, "beside-rates")
    assert "No study has a change to hand over." in part(said, "beside-effects")


def test_studies_of_the_same_name_are_named_by_their_folders(tmp_path):
    folders = [make_study(tmp_path / place / "runs") for place in ("here", "there")]
    said = page([read(folder, folder.read_summary()) for folder in folders])
    for folder in folders:
        assert str(folder.path) in said


def test_a_verified_file_is_compared_with_its_claim(folder):
    side = {"value": 10.0, "ci": [9.0, 11.0]}
    claim = {"ratio": 2.0, "ci": [1.9, 2.1], "baseline": side, "best": side}
    found = {
        "file": "best.yaml", "changed": {"precision.amp": "bf16"}, "claimed": claim,
        "now": {"ratio": 1.5, "ci": [1.4, 1.6], "num_rounds": 4, "baseline": side, "best": side}, "verdict": "no longer holds",
        "reason": "it is slower", "left": {"ratio": 0.75, "ci": [0.7, 0.8]}, "differences": [], "long": None,
    }  # fmt: skip
    said = page_of(folder, verification=found)
    assert "no longer holds: 1.50x now, 2.00x claimed" in text_of(said)
    assert "search again: autotune run" in text_of(said)
    assert "use the best settings" not in text_of(said)
    assert "2.00x [1.90, 2.10]" in part(said, "rates")


def test_report_of_a_recording_proposes_a_replay_and_no_settings(folder):
    said = text_of(page_of(folder, recording={"configurations": 4, "trials": 12}))
    assert "compare searches on the recorded table: autotune replay" in said
    assert "use the best settings" not in said
    assert "lines for the training script" not in said


def test_secrets_of_the_environment_are_masked(folder):
    folder.mask = lambda words: words.replace("hunter2hunter2", "***")
    said = page_of(folder, title="train.py hunter2hunter2")
    assert "hunter2" not in said
    assert "train.py ***" in said


def test_content_security_policy_allows_only_the_style_of_the_page(whole):
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', whole)[1])
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert " style=" not in re.sub(r"<style>.*?</style>", "", whole, flags=re.DOTALL)
    assert "<script" not in whole


@pytest.mark.parametrize(
    ("high", "values"), [(7.0, [0, 2, 4, 6]), (1.0, [0, 0.5, 1.0]), (0.0, [0.0]), (float("nan"), [0.0]), (100, [0, 50, 100])]
)
def test_axes_have_round_values(high, values):
    assert round_values(high) == pytest.approx(values)


def test_batch_axes_have_powers_of_two():
    assert powers_of_two(12, 170) == [16, 32, 64, 128]


def test_a_scale_stays_within_its_ends():
    assert [Scale(1.0, 4.0, is_log=True)(value) for value in (0.0, 1.0, 2.0, 9.0)] == [0.0, 0.0, 0.5, 1.0]
    assert Scale(2.0, 2.0)(2.0) == 0.5
    assert Scale(-0.1, 0.3).ticks() == pytest.approx([-0.1, 0.0, 0.1, 0.2, 0.3])


def test_bar_of_length_zero_is_still_visible():
    assert 'width="0.2%"' in bar(0.0, 0.0, "best")


def test_only_pairs_of_backticks_are_code():
    assert inline_code("run `a <b>` now") == "run <code>a &lt;b&gt;</code> now"
    assert inline_code("it`s <b>") == "it`s &lt;b&gt;"


def test_no_line_breaks_inside_an_interval_or_before_a_percent_sign():
    assert tied("+25 % [18, 80] or more") == "+25\u00a0% [18,\u00a080] or more"


def test_path_may_break_after_a_slash():
    assert breakable("/a<b>/c.py") == "/<wbr>a&lt;b&gt;/<wbr>c.py"


@pytest.mark.thorough
def test_a_trace_that_slowed_the_step_too_much_is_not_drawn(tmp_path):
    folder = made.complete(tmp_path)
    for index in folder.path.glob("trials/*/explain/tables.json"):
        index.write_text(json.dumps({**json.loads(index.read_text()), "distortion": {"0": 1.8}}))
        table = json.loads((index.parent / "breakdown.json").read_text())
        table["notes"] = ["the profiler makes a step 1.8 times as long"]
        (index.parent / "breakdown.json").write_text(json.dumps(table))
    said = page_of(folder)
    assert "without a profiler" in part(said, "breakdown")
    assert "forward" in part(said, "breakdown")
    assert "the profiler makes" not in part(said, "breakdown")
    assert "Best: the profiler makes a step 1.8 times as long." in part(said, "categories")
    assert "matrix products" not in part(said, "categories")


def test_step_shares_are_the_same_in_the_report_and_on_the_terminal(complete, whole, capsys):
    assert main(["show", complete.name, "--why", "--runs-dir", str(complete.path.parent)]) == 0
    terminal = capsys.readouterr().out
    listed = re.search(r"a step takes 100 ms: ([^\n]*)", terminal)
    assert listed is not None
    shares = dict(re.findall(r"(\w+) (\d+) %", listed[1]))
    assert shares
    for name, share in shares.items():
        words = {"input": "waiting for input"}.get(name, name)
        assert re.search(rf"{words}.*?{share}.%", part(whole, "breakdown"), re.DOTALL), name
    assert sum(map(int, shares.values())) == pytest.approx(100, abs=2)


def test_damaged_trial_record_does_not_hide_the_other_trials(folder):
    (folder.trial_path(0) / "trial.json").write_text("{")
    said = page_of(folder)
    assert "2.41x" in said
    assert "7 trials in" in said  # the others are read
    assert json.loads((folder.path / "summary.json").read_text())["study"] == "resnet18"
