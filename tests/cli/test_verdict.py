"""The verdict as a headline, as plain lines and as a panel, for every state of a study."""

import dataclasses
import io

import pytest
from rich.console import Console

from autotune.cli import trials
from autotune.cli.main import main
from autotune.cli.terminal import THEME
from autotune.cli.verdict import lines, panel
from autotune.cli.waterfall import Waterfall
from autotune.explained import limit_lines
from autotune.harness.explain.documents import PASSES
from autotune.quantities import number_text
from autotune.report.first_lines import first_lines
from autotune.report.study import Study
from autotune.report.verdict import advice_of, next_commands
from autotune.wording import gain_text, headline, objective_text
from tests.support.studies import make_study

FASTER = {"ratio": 2.41, "ci": [2.36, 2.46], "verdict": "faster", "reason": ""}
UNPROVEN = {"ratio": 1.5, "ci": None, "verdict": "ambiguous", "reason": "the finals have not run: the search's own numbers"}
NOTHING = {"ratio": None, "ci": None, "verdict": "ambiguous", "reason": "nothing but the baseline was measured"}
LABELS = ("left", "new", "kept", "continued", "overwritten", "not guarded")
SLOWER = {"ratio": None, "ci": None, "verdict": "same", "reason": "no configuration that trained came close to the baseline"}


@pytest.fixture
def folder(tmp_path):
    return make_study(tmp_path / "runs")


@pytest.mark.parametrize(
    ("status", "speedup", "said"),
    [
        ("complete", FASTER, "faster: 2.41x [2.36, 2.46]"),
        ("interrupted", FASTER, "faster: 2.41x [2.36, 2.46] (interrupted)"),
        ("interrupted", UNPROVEN, "ambiguous: 1.50x (interrupted)"),
        ("complete", NOTHING, "no verdict: nothing but the baseline was measured"),
        ("complete", SLOWER, "same: no configuration that trained came close to the baseline"),
        ("interrupted", None, "interrupted: stopped by the user"),
        ("running", None, "running"),
        ("failed", None, "failed: stopped by the user"),
    ],
)
def test_headline_states_a_ratio_only_after_a_comparison(status, speedup, said):
    reason = "" if status == "running" else "stopped by the user"
    assert headline({"status": status, "reason": reason, "speedup": speedup}) == said


def test_verdict_states_its_reason_once(folder):
    said = lines({**folder.read_summary(), "speedup": NOTHING}, folder.path)
    assert sum(NOTHING["reason"] in line for line in said) == 1
    assert f"reason  {UNPROVEN['reason']}" in lines({**folder.read_summary(), "speedup": UNPROVEN}, folder.path)


@pytest.mark.parametrize(("speedup", "num_trials", "is_best"), [(SLOWER, 8, True), (UNPROVEN, 8, True), (NOTHING, 1, False)])
def test_baseline_is_called_the_best_only_if_others_were_measured(folder, speedup, num_trials, is_best):
    summary = folder.read_summary()
    summary |= {"speedup": speedup, "trials": summary["trials"][:num_trials]}
    summary["best"] = {**summary["baseline"], "overrides": {}}
    assert ("best  the baseline" in lines(summary, folder.path)) is is_best
    assert ("best         the baseline" in drawn(summary, folder.path, 80)) is is_best


def test_verdict_reports_what_happened_to_the_user_files(folder):
    files = {
        "left": [{"name": "out", "bytes": 4, "trial": 2}],
        "new": [{"name": "out", "bytes": 4, "trial": 3}, {"name": "notes.txt", "bytes": 4, "trial": 2}],
        "kept": [{"path": "/w/best.pt", "trials": [0, 1, 2, 3, 4, 5, 6]}],
        "continued": [{"path": "out/last.pt", "trials": [3]}],
        "aside": [{"path": "/w/last.pt", "copy": "/w/runs/x/trials/0001/kept/last.pt", "trial": 1}],
        "unguarded": [{"path": "/nfs/a.pt", "why": "Invalid argument"}],
    }
    said = lines({**folder.read_summary(), "files": files}, folder.path)
    assert [line for line in said if line.partition("  ")[0] in LABELS] == [
        "left  out (4 B, trial 2): written by trials, not removed",
        "new  notes.txt (4 B): written during the study, by a trial or by another program",
        "kept  /w/best.pt: trials 0, 1, 2, 3, 4 and 2 more would have changed it; it is unchanged",
        "continued  out/last.pt: trial 3 continued from this checkpoint, which an earlier trial had saved: their losses belong "
        "to a later part of the training. Let each run start anew",
        "overwritten  /w/last.pt: changed or removed during trial 1; its previous content is in "
        "/w/runs/x/trials/0001/kept/last.pt",
        "not guarded  /nfs/a.pt (Invalid argument): a trial that saves there overwrites it",
    ]


def test_verdict_states_loss_parity_and_rejected_configurations(folder):
    out = {"knobs": {"precision.amp": "bf16"}, "reason": "loss 3.1 against 1.2 after 40 steps", "trial": 9}
    found = {"verdict": "passed", "text": "within 0.4 % of the baseline's loss over 40 steps", "failed": [out], "training": {}}
    said = lines({**folder.read_summary(), "parity": found}, folder.path)
    assert "parity  loss within 0.4 % of the baseline's loss over 40 steps" in said
    assert "rejected  bf16: loss 3.1 against 1.2 after 40 steps" in said


def test_faster_configurations_that_failed_are_named_if_the_verdict_is_same(folder):
    same = {"ratio": 1.0, "ci": [0.99, 1.01], "verdict": "same", "reason": "", "num_rounds": 5}
    failed = {"trial": 7, "overrides": {"precision.amp": "bf16"}, "ratio": 1.32, "outcome": "device_oom", "reason": "CUDA OOM"}
    summary = {**folder.read_summary(), "speedup": same, "failed_finalists": [failed] * 4}
    text = "Faster in the search, but failed when checked again: trial 7, 1.32x (bf16): device_oom, CUDA OOM; trial 7"
    shown = io.StringIO()
    Console(file=shown, width=1000, theme=THEME).print(panel(summary, folder.path))
    gained = first_lines(Study(folder=folder, summary=summary))[0]
    for said in ("\n".join(lines(summary, folder.path)), shown.getvalue(), " ".join(gained.more)):
        assert text in said
        assert "; 1 more" in said
        assert "about as well as it can" not in said
    assert "about as well as it can" in advice_of({**summary, "failed_finalists": []})


@pytest.mark.parametrize(
    ("verdict", "lead"), [("ambiguous", "give the study more time"), ("same", "keep the program as it is")]
)
def test_report_advises_to_keep_the_program_only_if_the_verdict_is_same(folder, verdict, lead):
    summary = folder.read_summary()
    found = {"ratio": 1.1, "ci": [0.8, 1.5], "verdict": verdict, "reason": "", "num_rounds": 2}
    summary |= {"speedup": found, "best": {**summary["best"], "overrides": {}}, "budget_s": 240.0}
    following = first_lines(Study(folder=folder, summary=summary))[2]
    assert following.lead.startswith(lead)
    assert any(each.startswith("autotune resume resnet18") for each in following.commands) is (verdict == "ambiguous")


def test_outcomes_count_passes_and_checks_separately(folder):
    summary = folder.read_summary()
    counted = "5 ok, 1 raced, 1 host_oom, 1 timeout"
    assert f"outcomes  {counted}" in lines(summary, folder.path)
    kinds = [(8, "explain", "ok"), (9, "explain", "timeout"), (10, "check", "ok"), (12, "explain", "ok")]
    summary["trials"] += [{**summary["trials"][0], "number": n, "kind": kind, "outcome": said} for n, kind, said in kinds]
    apart = f"{counted}; not among these, 3 passes and 1 check: 3 ok, 1 timeout (trials 0008 to 0010, 0012)"
    assert f"outcomes  {apart}" in lines(summary, folder.path)
    assert apart in " ".join(drawn(summary, folder.path, 80).replace("│", " ").split())


def test_study_without_a_comparison_prints_no_ratio(folder):
    summary = {**folder.read_summary(), "status": "interrupted", "reason": "stopped by the user", "speedup": None}
    summary |= {"attribution": [], "minimality": None}
    assert not any("1.00x" in line for line in lines(summary, folder.path))


def test_next_command_of_an_interrupted_study_resumes_that_study(tmp_path):
    first = make_study(tmp_path / "runs", status="interrupted")
    make_study(tmp_path / "runs")
    commands = next_commands(first.read_summary(), first.path)
    assert commands[0] == f"autotune resume {first.path} --runs-dir {tmp_path / 'runs'}"
    assert not any(command.startswith("autotune export") for command in commands), "the study has no winner"


@pytest.mark.parametrize(
    ("uri", "command"),
    [
        ("null", "autotune ui --runs-dir {runs}"),
        ("none", ""),
        ("http://host:5000", "autotune ui --runs-dir {runs} --uri http://host:5000"),
        ("postgresql://***@host/db", ""),
    ],
)
def test_next_command_opens_mlflow_where_the_study_is_tracked(folder, tmp_path, uri, command):
    folder.config_file.write_text(f"tracker:\n  uri: {uri}\n", encoding="utf-8")
    named = [each for each in next_commands(folder.read_summary(), folder.path) if each.startswith("autotune ui")]
    assert named == ([command.format(runs=tmp_path / "runs")] if command else [])


def test_finalist_that_lost_is_not_listed_with_its_ratio_of_the_search(folder):
    summary = folder.read_summary()
    lost = {**summary["speedup"], "verdict": "ambiguous", "ratio": 0.56, "overrides": {"precision.amp": "bf16"}}
    summary |= {"speedup": lost, "minimality": None, "attribution": [], "best": {**summary["baseline"], "overrides": {}}}
    (tried,) = (line for line in lines(summary, folder.path) if line.startswith("tried"))
    assert "bf16" not in tried
    assert "batch 128" in tried


def test_study_without_a_comparison_asks_for_more_time(folder, tmp_path):
    summary = folder.read_summary()
    summary |= {"speedup": NOTHING, "best": {**summary["baseline"], "overrides": {}}, "trials": summary["trials"][:1]}
    summary |= {"search_cost": {"seconds": 42.0, "trials": 0, "repaid_after_s": None, "ci": None, "why_not": "never: nothing"}}
    said = lines(summary, folder.path)
    assert "cost  42 s, no trial searched" in said
    assert f"next  autotune resume resnet18 --runs-dir {tmp_path / 'runs'} study.budget.minutes=16" in said
    summary["reason"] = "a trial takes about 58 s here, so give study.budget.minutes=20 at least"
    assert any(line.endswith("study.budget.minutes=20") for line in lines(summary, folder.path))
    assert not any(" resume " in line for line in lines({**summary, "speedup": SLOWER}, folder.path)), (
        "this verdict needs no more time"
    )


def test_study_with_nothing_to_search_asks_for_more_values(folder):
    summary = {**folder.read_summary(), "speedup": NOTHING, "identity": {"machine.num_cores": 2}}
    summary |= {"best": {**summary["baseline"], "overrides": {}}, "trials": summary["trials"][:1], "attribution": []}
    said = lines(summary, folder.path)
    assert not any(" resume " in line for line in said)
    assert sum(line.startswith("note  There was nothing to compare: ") for line in said) == 1
    following = first_lines(Study(folder=folder, summary=summary))[2]
    assert following.lead.startswith("start a study with other values")
    assert not following.commands
    summary["identity"] |= {"space.precision.amp": {"choice": ["off", "bf16"]}}
    assert any(" resume " in line for line in lines(summary, folder.path))
    assert first_lines(Study(folder=folder, summary=summary))[2].lead.startswith("give the study more time")


def test_next_command_trains_the_user_program_with_the_winner(folder, tmp_path):
    summary = {**folder.read_summary(), "command": ["python", "my train.py", "--size", "{loader.batch_size=8}"]}
    where = f"{folder.name} --runs-dir {tmp_path / 'runs'}"
    line = f"autotune apply {where} -- python 'my train.py' --size '{{loader.batch_size=8}}'"
    assert line in next_commands(summary, folder.path)
    assert f"autotune apply {where}" in next_commands({**summary, "is_recipe": True}, folder.path)
    assert next_commands({**summary, "command": ["python", "x" * 300]}, folder.path)[1] == f"autotune apply {where} -- COMMAND"


@pytest.mark.parametrize(
    ("objective", "verdict", "said"),
    [
        ("throughput", "faster", "faster: 1.31x [1.28, 1.34]"),
        ("time_for_samples", "faster", "faster: 1.31x [1.28, 1.34] less time for 1,000,000 samples"),
        ("energy_per_sample", "faster", "better: 1.31x [1.28, 1.34] less energy per sample"),
        ("energy_per_sample", "ambiguous", "ambiguous: 1.31x [1.28, 1.34] less energy per sample"),
        (["cost_per_epoch", "throughput"], "faster", "cheaper: 1.31x [1.28, 1.34] lower cost per epoch"),
    ],
)
def test_headline_names_the_objective(objective, verdict, said):
    speedup = {"ratio": 1.31, "ci": [1.28, 1.34], "verdict": verdict, "reason": ""}
    summary = {"status": "complete", "objective": objective, "terms": {"samples": 1_000_000}, "speedup": speedup}
    assert headline(summary) == said


def test_energy_is_stated_per_unit_of_the_rate():
    summary = {"objective": "energy_per_sample", "unit": "tokens"}
    assert gain_text(summary, 1.31) == "1.31x less energy per token"
    assert objective_text("energy_per_sample", 0.0021, "tokens") == "0.00210 J/token"
    assert trials.table(None, about=summary).columns[3].header.plain == "J/token"


def test_plain_verdict_gives_the_objectives_value_break_even_and_front(folder):
    summary = folder.read_summary()
    summary |= {"objective": ["time_for_samples", "throughput"], "terms": {"samples": 1_000_000}}
    summary["best"] |= {"objectives": {"time_for_samples": 25_000.0}, "objectives_ci": {"time_for_samples": [24_900, 25_100]}}
    summary["break_even"] = {"samples": 76_800.0, "steps": 1200.0, "seconds": 126.0, "dearer_s": 38.0, "compile_s": 38.0}
    summary["front"] = [{"trial": 5, "objectives": {"time_for_samples": 25_000.0, "throughput": 40.6}, "overrides": {},
                         "measured_in": "finals"}]  # fmt: skip
    said = lines(summary, folder.path)
    assert "best  6 h 57 min at 40.6 samples/s [6 h 55 min, 6 h 58 min] trial 5, mean of the finals; 40.7 in the search" in said
    assert (
        "note  compilation pays off after 1,200 steps (2 min 06 s): training starts 38 s later if nothing is compiled yet"
        in said
    )
    assert "front  trial 5: 6 h 57 min, 40.6 samples/s  unchanged (finals)" in said
    summary["break_even"]["steps"] = 0.3
    assert any("pays off after 1 step (" in line for line in lines(summary, folder.path))


def drawn(summary, path, width):
    page = Console(file=io.StringIO(), width=width, color_system=None, theme=THEME)
    page.print(panel(summary, path))
    return page.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_waterfall_shows_every_factor_in_full_on_any_terminal(folder, width):
    text = drawn(folder.read_summary(), folder.path, width)
    assert max(map(len, text.splitlines())) <= width
    for factor in ("1.62x", "1.38x", "1.03x", "2.41x", "[1.58, 1.66]", "ambiguous"):
        assert factor in text
    assert "no clear effect" in text
    assert "16.8 samples/s" in text
    assert "38.4" in text, "the best of the tier numerics"
    assert ("█" in text) is (width == 120)


def test_waterfall_shows_the_factor_that_its_changes_leave_unexplained(folder):
    summary = folder.read_summary()
    summary["attribution"] = summary["attribution"][:2]
    summary["best"]["overrides"] = {entry["knob"]: entry["to"] for entry in summary["attribution"]}
    assert "help each other  1.08x" in drawn(summary, folder.path, 120)
    summary["attribution"][0]["ratio"] = 1.75
    assert "help each other" not in drawn(summary, folder.path, 120), "1.75 x 1.38 explains the whole ratio"


def test_waterfall_of_a_study_from_before_attribution_lists_the_changes(folder):
    summary = {**folder.read_summary(), "attribution": []}
    del summary["minimality"]
    text = drawn(summary, folder.path, 80)
    assert "off → bf16" in text
    assert "together" not in text


def test_plain_lines_state_the_budget_that_measures_a_missing_effect(folder):
    missing = "effects  only tried together with other changes: batch 64; "
    said = lines({**folder.read_summary(), "effects_need": {"minutes": 11, "more_minutes": 3.0}}, folder.path)
    assert f"{missing}its effect can be measured in about 3 more minutes: study.budget.minutes=11" in said


def test_values_that_were_tried_and_not_kept_are_named_with_their_ratio(folder):
    summary = folder.read_summary()
    failed = "batch 128 0.39x, batch 4096 host_oom, compile default timeout"
    told = f"not kept: {failed} (each the fastest trial with that value, relative to the best configuration's first)"
    assert f"tried  {told}" in lines(summary, folder.path)
    assert told in " ".join(drawn(summary, folder.path, 80).replace("│", " ").split())
    foreach = {**summary["trials"][2], "number": 8, "changed": {"optimizer.implementation": "foreach"}, "value": 39.5}
    again = {**foreach, "number": 9, "value": 37.0}
    dropped = {**foreach, "number": 10, "changed": {"loader.pin_memory": True}, "value": 40.0}
    cut = {**foreach, "number": 11, "changed": {"threads.intra": 1}, "outcome": "interrupted", "value": None}
    summary["trials"] += [foreach, again, dropped, cut]
    (line,) = [line for line in lines(summary, folder.path) if line.startswith("tried")]
    assert line.startswith(f"tried  not kept: foreach optimizer 0.97x, {failed} (")
    more = {**foreach, "number": 12, "changed": {"threads.intra": 1}, "value": 20.0}
    summary["trials"].append(more)
    (line,) = [line for line in lines(summary, folder.path) if line.startswith("tried")]
    assert " threads 1 0.49x, batch 128 0.39x, batch 4096 host_oom and 1 more (" in line
    late = {**summary["best"], "trial": 13}  # the best without ineffective changes, measured late on a slower machine
    summary["trials"].append({**foreach, "number": 13, "kind": "attribution", "changed": late["overrides"], "value": 30.0})
    (line,) = [one for one in lines({**summary, "best": late}, folder.path) if one.startswith("tried")]
    assert line.startswith("tried  not kept: foreach optimizer 0.97x, "), "relative to the search's trial"
    kept = {**summary, "best": {**summary["baseline"], "overrides": {}}, "minimality": None, "attribution": []}
    (line,) = [line for line in lines(kept, folder.path) if line.startswith("tried")]
    assert line.startswith("tried  not kept: bf16 2.42x, channels_last 2.42x, workers 2 2.42x, batch 64 2.42x and ")
    assert line.endswith(" (each the fastest trial with that value, relative to the baseline's first)")


def test_missing_effects_are_noted_once_and_not_in_every_row(folder):
    summary = {**folder.read_summary(), "effects_need": {"minutes": 7, "more_minutes": 4.0}}
    missing = {"verdict": "not measured", "ratio": None, "ci": None, "basis": "", "reason": "no time"}
    summary["attribution"] = [{**one, **missing} for one in summary["attribution"]]
    for text in (" ".join(lines(summary, folder.path)), " ".join(drawn(summary, folder.path, 80).replace("│", " ").split())):
        assert text.count("only tried together with other changes") == 1
        assert "their effects can be measured in about 4 more minutes: study.budget.minutes=7" in text
        assert "not measured" not in text
        assert "off" in text


@pytest.mark.parametrize(
    ("side", "rounds", "said"),
    [
        ({"measured_in": "finals"}, 3, "trial 5, mean of 3 rounds of the finals; 40.7 in the search"),
        ({"measured_in": "finals", "value": 40.7}, 3, "trial 5, mean of 3 rounds of the finals"),
        ({"measured_in": "finals"}, 1, "trial 5, one round of the finals; 40.7 in the search"),
        ({"measured_in": "search", "value": 40.7}, None, "trial 5, measured once"),
        (
            {"measured_in": "finals", "num_unpaired": 2},
            None,
            "trial 5, mean of 2 measurements, in the search and in the finals; 40.7 in the search",
        ),
    ],
)
def test_rate_names_the_measurement_it_comes_from(folder, side, rounds, said):
    summary = folder.read_summary()
    summary["best"] |= side
    summary["speedup"]["num_rounds"] = rounds
    assert f"{number_text(summary['best']['value'])} samples/s [40.1, 41.1] {said}" in "\n".join(lines(summary, folder.path))
    assert said in " ".join(drawn(summary, folder.path, 80).replace("│", " ").split())
    summary["baseline"]["value"] = 16.9
    line = next(line for line in lines(summary, folder.path) if line.startswith("baseline"))
    assert line.endswith("the finals; 16.8 before the search")


def test_verdict_mentions_lasting_noise_drift_and_the_page_cache(folder):
    quiet = folder.read_summary()
    assert not any(line.startswith(("disturbed", "drift", "disk")) for line in lines(quiet, folder.path))
    beside = {"since_trial": 4, "level": {"cpu": 1.2}, "words": "other programs used 1.2 of 2 cores"}
    noisy = {"disturbed_by": beside, "drift": "405 first", "page_cache": "the data set does not fit"}
    said = lines({**quiet, **noisy}, folder.path)
    assert any(line.startswith("disturbed  other programs used 1.2 of 2 cores from trial 4 on") for line in said)
    assert "disk  the data set does not fit" in said
    assert "drift  405 first" in said


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (
            {"repaid_after_s": 936.0, "ci": [900.0, None], "why_not": ""},
            "cost  8 min 02 s, 31 trials searched; "
            "pays off if the unchanged training takes more than 15 min 36 s [15 min, never]",
        ),
        (
            {"repaid_after_s": None, "ci": None, "why_not": "never: nothing faster was found"},
            "cost  8 min 02 s, 31 trials searched; never pays off: nothing faster was found",
        ),
    ],
)
def test_verdict_states_the_search_cost_and_when_it_pays_off(folder, cost, said):
    summary = {**folder.read_summary(), "search_cost": {"seconds": 482.0, "trials": 31, **cost}}
    assert said in lines(summary, folder.path)
    assert "31 trials" in drawn(summary, folder.path, 100)


def test_step_phases_explain_the_limit_if_no_finding_is_large():
    phases = {"input": 0.078, "transfer": 0.0, "forward": 0.331, "backward": 0.705, "optimizer": 0.011}
    finding = {
        "cause": "too few workers", "where": "training thread", "remedy": {"knob": "loader.num_workers", "value": 1},
        "gain": {"low": 0.0, "mid": 0.03, "high": 0.07, "kind": "predicted"},
    }  # fmt: skip
    passes = {name: {"trial": 10, "outcome": "ok", "reason": ""} for name in PASSES}
    entry = {"trial": 9, "phases_s": phases, "findings": [finding], "passes": passes}
    summary = {"study": "mine", "best": {"trial": 9}, "explanation": {"explained": [entry]}}
    first, second = limit_lines(summary)
    assert first == "nothing in particular: a step is 63 % backward, 29 % forward, 7 % input"
    assert second.startswith("too few workers")
    finding["gain"] = {"low": 0.1, "mid": 0.2, "high": 0.3, "kind": "predicted"}
    assert len(limit_lines(summary)) == 1


def test_passes_that_did_not_run_are_named_where_no_cause_was_found(tmp_path):
    passes = {name: {"trial": 10, "outcome": "ok", "reason": ""} for name in PASSES}
    entry = {"trial": 9, "phases_s": {"forward": 0.4, "backward": 0.6}, "findings": [], "passes": passes}
    summary = {"study": "mine", "best": {"trial": 9}, "explanation": {"explained": [entry]}}
    assert limit_lines(summary) == [
        "nothing in particular: a step is 60 % backward, 40 % forward",
        "no known cause costs 3 % or more",
    ]
    entry["passes"] = {"lines": passes["lines"], "memory": {**passes["memory"], "outcome": "timeout"}}
    assert limit_lines(summary) == [
        "nothing in particular so far: a step is 60 % backward, 40 % forward",
        "no known cause costs 3 % or more in what was recorded so far; `autotune explain mine` records more: trace and memory",
    ]
    assert "`autotune explain mine --runs-dir other` records more" in limit_lines(summary, "mine --runs-dir other")[1]
    summary = {**make_study(tmp_path, "mine").read_summary(), **summary}
    make_study(tmp_path, "mine")
    assert any(f"autotune explain {tmp_path}/mine " in line for line in lines(summary, tmp_path / "mine"))
    entry["phases_s"] = {}
    assert limit_lines(summary) == []


def test_values_too_long_for_a_table_become_phrases(tmp_path):
    summary = make_study(tmp_path).read_summary()
    entry = {**summary["attribution"][0], "knob": "loader.sharing_strategy", "from": "file_descriptor", "to": "file_system"}
    console = Console(file=io.StringIO(), width=80, theme=THEME)
    best = {**summary["best"], "overrides": {**summary["best"]["overrides"], entry["knob"]: entry["to"]}}
    console.print(Waterfall({**summary, "best": best, "attribution": [*summary["attribution"], entry]}))
    said = console.file.getvalue()
    assert "shared by file_system  1.62x" in said
    assert "file_descriptor" not in said


def test_complete_study_without_a_budget_is_not_told_to_raise_it(tmp_path, capsys):
    folder = make_study(tmp_path)
    folder.write_study(dataclasses.replace(folder.read_study(), identity={"machine.num_cores": 2}))
    folder.write_summary({**folder.read_summary(), "budget_s": None, "budget_trials": None, "reason": "nothing is left to try"})
    assert main(["resume", str(folder.path)]) == 0
    assert capsys.readouterr().out.endswith("complete  nothing is left to try.\n")


def test_budget_for_a_verification_is_refused_when_it_is_resumed(tmp_path, capsys):
    folder = make_study(tmp_path, "verify-best")
    changes = {"identity": {"machine.num_cores": 2}, "verifies": {"rounds": 4}}
    folder.write_study(dataclasses.replace(folder.read_study(), **changes))
    assert main(["resume", str(folder.path), "study.budget.minutes=16"]) == 2
    assert "study.budget.minutes: has no effect on a verification, got" in capsys.readouterr().err
