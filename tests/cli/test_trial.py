"""`autotune show STUDY --trial N`, and how the table describes the changes of a trial."""

import json
import re

import pytest

from autotune.cli import trials
from autotune.cli.terminal import console
from autotune.wording import against_phrase
from tests.support.studies import make_study


@pytest.fixture
def study(cli):
    return make_study(cli.cwd / "runs", "resnet18")


def test_trial_is_available_as_json(cli, study):
    assert json.loads(cli("show", "resnet18", "--trial", "1", "--json").stdout)["number"] == 1


@pytest.mark.parametrize(
    ("ran", "told"),
    [
        ({"slot": "2: n1, job 12", "host": "n1", "neighbours": 3}, "slot 2: n1, job 12, beside 3 others"),
        ({"slot": "1", "host": "here", "neighbours": 1}, "slot 1, beside 1 other"),
        ({"evidence": {"node": {"host": "n1", "boot_id": "x", "job": "12"}}}, "n1, job 12"),
        ({"evidence": {"node": {"host": "n1", "boot_id": "x", "job": ""}}}, "n1"),
        ({"evidence": {"node": 5}}, ""),
    ],
)
def test_show_trial_says_where_the_trial_ran(cli, study, ran, told):
    file = cli.cwd / "runs" / "resnet18" / "trials" / "0001" / "trial.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ran))
    said = re.search(r"ran on +(.*?) *\n", cli("show", "resnet18", "--trial", "1").stdout)
    assert (said[1] if said else "") == told


def test_workers_that_had_to_be_forked_are_shown_as_forked(cli, study):
    file = cli.cwd / "runs" / "resnet18" / "trials" / "0001" / "trial.json"
    trial = json.loads(file.read_text())
    trial["knobs"]["loader.multiprocessing_context"] = "forkserver"  # the program's own
    trial["knob_reports"]["loader.multiprocessing_context"] = {"status": "applied", "reason": "no guard", "observed": "fork"}
    file.write_text(json.dumps(trial))
    said = cli("show", "resnet18", "--trial", "1").stdout
    assert re.search(r"loader.multiprocessing_context +fork +applied: no guard", said)


def test_the_name_of_a_metric_is_no_markup(cli, study):
    file = cli.cwd / "runs" / "resnet18" / "trials" / "0001" / "trial.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "metrics": {"[/x]": 2.5}}))
    assert re.search(r"\[/x\] +2.5", cli("show", "resnet18", "--trial", "1").stdout)


def test_setting_that_the_baseline_did_not_set_is_shown_as_not_set(cli, study):
    file = cli.cwd / "runs" / "resnet18" / "trials" / "0000" / "trial.json"
    baseline = json.loads(file.read_text())
    del baseline["knobs"]["precision.amp"]
    file.write_text(json.dumps(baseline))
    assert re.search("precision.amp +not set -> bf16", cli("show", "resnet18", "--trial", "1").stdout)


def test_configuration_is_described_relative_to_a_similar_one():
    best = {"precision.amp": "bf16", "layout.channels_last": True, "loader.num_workers": 4}
    assert against_phrase({**best, "loader.num_workers": 8}, best, 3) == "as 0003 with workers 8"
    assert against_phrase({"precision.amp": "bf16", "layout.channels_last": True}, best, 3) == "as 0003 without workers 4"
    assert against_phrase({"loader.batch_size": 64}, best, 3) == "batch 64"
    assert against_phrase(best, {}, 0) == "bf16 · channels_last · workers 4"


@pytest.mark.parametrize("width", [60, 80, 120, 200, None])
def test_changes_of_a_trial_are_wrapped_and_never_cut(width):
    changed = {"precision.amp": "bf16", "layout.channels_last": True, "optimizer.implementation": "fused"}
    changed |= {"loader.num_workers": 8, "loader.persistent_workers": True, "compile.mode": "max-autotune", "threads.intra": 16}
    trial = {"number": 1, "kind": "search", "outcome": "ok", "value": 50.0, "changed": changed}
    out = console(width=width or 10_000)
    with out.capture() as capture:
        out.print(trials.rows([trial], width=width, summary={"unit": "samples", "trials": [trial]}))
    text = " ".join(capture.get().split())
    for word in ("bf16", "channels_last", "fused", "workers", "max-autotune", "16"):
        assert word in text
    assert "…" not in text
    assert max(map(len, capture.get().splitlines())) <= (width or 400)
