"""A study's document that is cut off, edited or of another version gives one message, never an internal error."""

import json

import pytest

from autotune.cli.main import main
from autotune.records import Kind, Outcome, TrialRecord
from tests.support.studies import make_study

DAMAGE = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "not JSON": lambda text: "hello",
    "a list": lambda text: "[1, 2]",
    "bytes": lambda text: text.encode()[:100] + b"\xff\xfe",
    "deep": lambda text: "[" * 100_000,
    "another schema": lambda text: json.dumps({**json.loads(text), "schema": "99"}),
    "of another kind": lambda text: json.dumps({**json.loads(text), "trials": 5, "machine": 7, "command": 1, "knobs": 3}),
    "without fields": lambda text: json.dumps({"schema": 1}),
}


@pytest.fixture(params=list(DAMAGE))
def damage(request):
    def apply(file):
        damaged = DAMAGE[request.param](file.read_text())
        file.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())

    return apply


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def study(runs):
    return make_study(runs)


@pytest.fixture
def said(capsys):
    """Returns a function that runs a command, checks its exit status, and returns its output."""

    def run(status, *words):
        assert main(words) == status
        out, err = capsys.readouterr()
        assert status == 0 or (out == "" and len(err.splitlines()) == 1)
        return err if status else out

    return run


def edited(text, name, **changes):
    document = json.loads(text)
    document[name] = {**(document.get(name) or {}), **changes}
    return json.dumps(document)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("speedup", {"ci": []}, "speedup.ci: expected interval, got []"),
        ("best", {"value": "fast"}, "best.value: expected number, got 'fast'"),
        ("baseline", {"ci": [1, "two"]}, "baseline.ci: expected interval, got [1, 'two']"),
        ("machine", {"gpus": [7]}, "machine.gpus.0: expected mapping, got 7"),
        ("files", {"continued": [{"path": "last.pt"}]}, "files.continued.0.trials: missing"),
    ],
)
def test_message_names_the_summary_field_of_the_wrong_type(study, name, changes, words, said):
    study.summary_file.write_text(edited(study.summary_file.read_text(), name, **changes))
    for command in ("show", "export", "report"):
        assert f"summary.json: not a summary, got: {words}. The trials are in" in said(2, command, "resnet18")
    assert json.loads(said(0, "list", "--json"))[0]["status"] == "unreadable"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("knob_reports", {"precision.amp": 1e300}),
        ("knob_reports", {"precision.amp": {"status": {}}}),
        ("evidence", {"error": "boom"}),
        ("evidence", {"earlier_attempt": {"seconds": "long"}}),
        ("scores", {"throughput": "fast"}),
    ],
)
def test_message_names_the_trial_record_field_of_the_wrong_type(name, value, runs, said):
    file = make_study(runs).trial_path(1) / "trial.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    assert f"trial record's {name}." in said(2, "show", "resnet18", "--trial", "1")
    said(0, "report", "resnet18")


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("name", ["title", "reason", "objective", "unit", "fingerprint", "placeholders"])
def test_summary_without_its_optional_fields_is_used(study, name, is_there, said):
    document = {**json.loads(study.summary_file.read_text()), name: None}
    document["best_by_tier"]["exact"] = None
    study.summary_file.write_text(json.dumps(document if is_there else {k: v for k, v in document.items() if k != name}))
    for words in (["list"], ["show"], ["export"], ["export", "--format", "env"], ["report"]):
        said(0, *words)


def test_message_about_a_missing_summary_names_the_command_that_rebuilds_it(study, said):
    study.write_trial(TrialRecord(number=0, kind=Kind.baseline, knobs={}, changed={}, outcome=Outcome.ok))
    study.summary_file.unlink()
    message = said(2, "show", "resnet18")
    assert "summary.json: missing. The trials are in" in message
    assert "`autotune resume resnet18` rebuilds the summary" in message


def test_show_offers_resume_for_a_study_killed_before_its_first_trial(study, said):
    study.summary_file.unlink()
    for file in study.trial_files("trial.json"):
        file.unlink()
    message = said(2, "show", "resnet18")
    assert "it was ended before its first trial. To continue: autotune resume resnet18" in message
    with study.claimed():
        assert "has nothing to show yet. Wait for its first trial." in said(2, "show", "resnet18")


@pytest.mark.parametrize("command", ["export", "report"])
def test_no_command_overwrites_the_records_of_a_study(study, command, runs, said):
    before = study.summary_file.read_text()
    assert "--output: a record of the study 'resnet18'" in said(2, command, "resnet18", "-o", "runs/resnet18/summary.json")
    assert study.summary_file.read_text() == before


def test_damaged_summary_is_named(study, runs, said, damage):
    make_study(runs, "other")
    damage(study.summary_file)
    for command in ("show", "export"):
        assert "runs/resnet18/summary.json: not a summary" in said(2, command, "resnet18")
    listed = json.loads(said(0, "list", "--json"))
    assert [(row["study"], row["status"]) for row in listed] == [("resnet18", "unreadable"), ("other", "complete")]
    assert "unreadable" in said(0, "list")


def test_damaged_study_record_is_reported_and_other_data_is_still_shown(study, runs, said, damage):
    make_study(runs, "other")
    damage(study.study_file)
    assert "faster: 2.41x" in said(0, "show", "resnet18"), "the summary is whole"
    assert "study.json: cannot be read" in said(2, "resume", "resnet18")
    listed = json.loads(said(0, "list", "--json"))
    assert [(row["study"], row["status"]) for row in listed] == [("resnet18", "unreadable"), ("other", "complete")]


def test_study_with_an_impossible_start_time_is_unreadable(study, said):
    study.study_file.write_text(json.dumps({**json.loads(study.study_file.read_text()), "started_at": 1e20}))
    (listed,) = json.loads(said(0, "list", "--json"))
    assert listed["verdict"] == "unreadable: study.json: study record's started_at: expected moment, got 1e+20"
    assert "unreadable" in said(0, "list")


def test_study_without_its_record_is_still_listed_and_shown(runs, said):
    make_study(runs, "other")
    study = make_study(runs)
    study.study_file.unlink()
    assert "faster: 2.41x" in said(0, "show", "resnet18")
    assert "study.json: cannot be read" in said(2, "resume", "resnet18")
    listed = {row["study"]: row for row in json.loads(said(0, "list", "--json"))}
    assert (listed["resnet18"]["status"], listed["other"]["status"]) == ("unreadable", "complete")
    assert "study.json: missing" in listed["resnet18"]["verdict"]


def test_file_of_a_damaged_trial_is_named_by_commands_that_need_it(runs, said, damage):
    study = make_study(runs, status="interrupted")
    record = study.read_study()
    record.identity = {"objective": "throughput"}
    record.cwd = str(runs)
    study.write_study(record)
    damage(study.trial_path(3) / "trial.json")
    said(0, "show", "resnet18")
    said(0, "show", "resnet18", "--trial", "5")
    assert "trials/0003/trial.json: cannot be read" in said(2, "show", "resnet18", "--trial", "3")
    assert "trials/0003/trial.json" in said(2, "explain", "resnet18")
    assert "trials/0003/trial.json" in said(2, "resume", "resnet18")


def test_renamed_trial_folder_is_not_read_as_a_trial(study, said):
    damaged = study.trial_path(3) / "trial.json"
    damaged.write_text("{")
    damaged.parent.rename(damaged.parent.with_name("0003.bak"))
    assert [record.number for record in study.read_trials()] == [0, 1, 2, 4, 5, 6, 7]
    assert "trial 0005" in said(0, "show", "resnet18", "--trial", "5")
    assert "--trial: no such trial of 'resnet18', got 3" in said(2, "show", "resnet18", "--trial", "3")
