"""What `show --why` and `explain` print, and which input they refuse."""

import contextlib
import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest

from autotune.cli.main import main
from autotune.explain import roofline
from autotune.explain.explanation import empty
from autotune.explain.table import Table
from autotune.explain.tables import Tables, write_tables
from autotune.studies import find
from tests.cli.test_golden import Terminal, compare
from tests.support.studies import make_study

PREDICTED = {"low": 0.30, "mid": 0.38, "high": 0.47, "kind": "predicted"}
CHECK = {
    "trial": 1, "cause": "too few workers", "where": "loader", "remedy": "loader.num_workers=2", "how": "pairs", "num_pairs": 2,
    "predicted": PREDICTED, "measured": {"low": 0.36, "mid": 0.41, "high": 0.46, "kind": "measured"}, "held": True,
}  # fmt: skip
FINDINGS = [
    {
        "cause": "too few workers",
        "where": "loader",
        "evidence": "1 worker; the step waits 31.2 ms of 102 ms for input; 6.1 ms of work a sample",
        "gain": CHECK["measured"],
        "basis": "2 pairs, measured alternately",
        "remedy": {"knob": "loader.num_workers", "value": 2},
        "check": CHECK,
    },
    {
        "cause": "Python in the step",
        "where": "train.py:48",
        "evidence": "20 ms of a step's 102 ms (20 %) `total += sum(i * i for i in range(n))`",
        "gain": {"low": 0.17, "mid": 0.24, "high": 0.40, "kind": "floor"},
        "basis": "2543 stack samples of the training thread in 5.1 s",
        "remedy": {"code": "replace the loop by tensor operations, do it every N steps, or move it to the loader's workers"},
        "check": None,
    },
]


def explained(name="resnet18"):
    make_study(Path("runs"), name)
    folder = find(Path("runs"), name)
    summary = folder.read_summary()
    best = summary["best"]["trial"]
    entry = {
        "trial": best,
        "role": "best",
        "passes": {
            "lines": {"trial": 40, "outcome": "ok", "reason": ""},
            "trace": {"trial": 41, "outcome": "crash", "reason": "x"},
        },
        "phases_s": {"input": 0.0312, "forward": 0.03, "backward": 0.02, "optimizer": 0.0008, "other": 0.02},
        "findings": [{**one, "check": {**CHECK, "trial": best} if one["check"] else None} for one in FINDINGS],
        "notes": ["trace: the pass ended as crash, x"],
    }
    document = {**empty(), "explained": [entry], "checks": [{**CHECK, "trial": best}], "accuracy": {"checked": 4, "held": 3}}
    folder.write_summary({**summary, "explanation": document})
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch, utc):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said_by(words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words) == 0
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, None])
@pytest.mark.parametrize("name", ["why", "verdict"])
def test_screens_of_an_explanation_match_the_golden_files(name, width, here, monkeypatch):
    for variable, value in {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width or "")}.items():
        monkeypatch.setenv(variable, value)
    if width is None:
        monkeypatch.delenv("COLUMNS")
    explained()
    out = Terminal() if width else io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["show", "resnet18", *(["--why"] if name == "why" else [])]) == 0
    compare(f"explained-{name}", width, out.getvalue())


def test_memory_of_an_explain_pass_is_not_shown_as_memory_of_the_program(here):
    folder = explained()
    summary = folder.read_summary()
    ran = {**summary["trials"][0], "number": 40, "kind": "explain", "value": None, "peak_memory_bytes": 609 << 20}
    folder.write_summary({**summary, "trials": [*summary["trials"], ran]})
    said = said_by(["show", "resnet18"])
    assert "0040" in said
    assert "609 MiB" not in said
    said_by(["report", "resnet18"])
    page = folder.report_file.read_text(encoding="utf-8")
    assert "0040" in page
    assert "609 MiB" not in page


def test_show_why_states_how_well_the_gpu_is_used(here):
    folder = explained()
    summary = folder.read_summary()
    summary["explanation"]["explained"][0]["passes"]["trace"] = {"trial": 5, "outcome": "ok", "reason": ""}
    folder.write_summary(summary)
    row = {
        **dict.fromkeys(roofline.COLUMNS), **dict.fromkeys(("device", "flops_from", "peak_source", "bound"), ""),
        "rank": 0, "busy_frac": 0.97, "tensor_core_frac": 0.287, "flops_per_s": 4.9e13, "mfu_frac": 0.099, "dtype": "tf32",
        "peak_flops_per_s": 4.95e14,
    }  # fmt: skip
    table = Table(name="roofline", title="", columns=dict.fromkeys(row, ""), rows=[row])
    write_tables(Tables(tables={"roofline": table}), folder.trial_path(5))
    said = " ".join(said_by(["show", "resnet18", "--why"]).split())
    assert (
        "the GPU is busy for 97.0 % of a step, its kernels spend 28.7 % of their time on Tensor Cores; 49.0 TFLOP/s, "
        "9.9 % of its peak in tf32, 495 TFLOP/s"
    ) in said


def test_show_why_prints_the_explanation_document_as_json(here):
    explained()
    document = json.loads(said_by(["show", "resnet18", "--why", "--json"]))
    assert document["explained"][0]["findings"][0]["cause"] == "too few workers"
    assert document["accuracy"] == {"checked": 4, "held": 3}


def test_command_that_checks_a_fix_is_shown_only_for_findings_and_names_the_trial(here):
    folder = explained()
    summary = folder.read_summary()
    entry = summary["explanation"]["explained"][0]
    assert "autotune explain resnet18 --fixed --" in " ".join(said_by(["show", "resnet18", "--why"]).split())
    summary["explanation"]["explained"] = [{**entry, "findings": []}]
    folder.write_summary(summary)
    assert "--fixed" not in said_by(["show", "resnet18", "--why"])
    summary["explanation"]["explained"] += [{**entry, "trial": 1, "role": "asked"}]
    folder.write_summary(summary)
    said = said_by(["show", "resnet18", "--why"])
    assert "autotune explain resnet18 --trial 1 --fixed --" in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--", sys.executable, "gone.py"], "COMMAND: no such script, got 'gone.py'"),
        (["--", sys.executable, "-c", "pass"], "--fixed: this trial of study 'resnet18' was not explained yet."),
    ],
)
def test_fix_that_cannot_be_measured_is_refused_before_a_node_is_requested(here, monkeypatch, capsys, words, expected):
    folder = make_study(Path("runs"), "resnet18")
    folder.write_study(dataclasses.replace(folder.read_study(), cwd=str(here)))
    requests = []
    monkeypatch.setattr("autotune.cli.explain._inputs", lambda *_: requests.append(1))
    assert main(["explain", "resnet18", "--fixed", *words]) == 2
    assert expected in capsys.readouterr().err
    assert requests == []


def test_secret_in_the_command_of_a_fixed_program_is_masked(here, monkeypatch):
    folder = make_study(Path("runs"), "resnet18")
    folder.write_study(dataclasses.replace(folder.read_study(), cwd=str(here)))
    asked = []
    monkeypatch.setattr("autotune.study.explaining.to_fix", lambda *_: None)
    monkeypatch.setattr("autotune.study.explain_study", lambda inputs, *_: asked.append(inputs.secrets))
    assert main(["explain", "resnet18", "--fixed", "--", sys.executable, "-c", "pass", "--api-key", "hunter2pass"]) == 0
    assert asked[0].message("python train_fixed.py --api-key hunter2pass") == "python train_fixed.py --api-key ***"


def test_show_why_refuses_what_was_not_explained_and_names_the_command_once(here, capsys):
    folder = explained()
    assert main(["show", "resnet18", "--why", "--trial", "3"]) == 2
    assert "--trial: not explained yet, got 3" in capsys.readouterr().err
    skipped = "a pass takes 33 s, a tenth of the study's time is 18 s; `autotune explain resnet18` runs the passes"
    folder.write_summary({**folder.read_summary(), "explanation": empty(skipped)})
    assert main(["show", "resnet18", "--why"]) == 2
    why = "(a pass takes 33 s, a tenth of the study's time is 18 s). Run `autotune explain resnet18`.\n"
    assert capsys.readouterr().err.endswith(why)
