"""This version reads what version 0.1.0 wrote (tests/data/written-by-0.1.0: a study of four minutes, a best.yaml, a
recorded table).

If you change a stored format, add a folder like this one and keep the old ones.
"""

import json
import tarfile
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.cli.main import main
from autotune.config.best_file import read_best
from autotune.config.recorded import recorded
from autotune.errors import BadInput
from autotune.replay.table import read
from autotune.run_dir import StudyFolder

SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.3 and older have no filters
DATA = Path(__file__).parents[1] / "data/written-by-0.1.0"


@pytest.fixture
def study(tmp_path, monkeypatch) -> StudyFolder:
    monkeypatch.chdir(tmp_path)
    with tarfile.open(DATA / "study.tar.gz") as archive:
        archive.extractall("runs", **SAFELY)
    return StudyFolder(Path("runs/mlp"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "--json"], "ambiguous: 0.89x [0.00, 484.44] with batch 64"),
        (["show"], "0005"),
        (["show", "--trial", "1"], "batch 64"),
        (["export"], "there is nothing to change"),
        (["report", "-o", "-"], "mlp on tabular"),
        (["resume", "mlp"], "complete"),
        (["prune"], "Nothing to remove"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_command_reads_a_study_of_0_1_0(study, capsys, words, said):
    assert main(words) == 0, capsys.readouterr().err
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("is_there", [True, False])
def test_study_without_a_reason_for_its_end_says_how_to_continue(study, capsys, is_there):
    document = {**json.loads(study.summary_file.read_text()), "reason": None}
    study.summary_file.write_text(json.dumps(document if is_there else {k: v for k, v in document.items() if k != "reason"}))
    assert main(["resume", "mlp"]) == 0, capsys.readouterr().err
    assert "complete. To continue, give it a larger budget: autotune resume mlp" in capsys.readouterr().out


def test_records_and_configuration_of_0_1_0_are_read_completely(study):
    trials = study.read_trials()
    assert [trial.number for trial in trials] == list(range(10))
    assert [str(trial.outcome) for trial in trials].count("disturbed") == 3
    assert trials[0].value == pytest.approx(484.28, abs=0.01)
    assert recorded(study.read_study(), study.config_file, []).config.study.budget.trials == 3


def test_a_journal_of_0_1_0_is_read_by_optuna(study):
    journal = JournalStorage(JournalFileBackend(str(study.journal_file)))
    found = optuna.load_study(study_name="mlp", storage=journal)
    assert [trial.user_attrs.get("trial") for trial in found.trials] == [0, 1, None]
    assert [trial.value for trial in found.trials[:2]] == pytest.approx([484.28, 610.73], abs=0.01)


def test_a_best_yaml_of_0_1_0_is_read():
    best = read_best(DATA / "best.yaml")
    assert best.knobs == {
        "loader.batch_size": 64, "loader.num_workers": 2, "precision.amp": "bf16", "layout.channels_last": True,
    }  # fmt: skip
    assert best.origin == ("resnet18", "2.41x", "2026-05-28")


def test_a_best_yaml_of_0_1_0_that_changes_nothing_is_read(study):
    best = read_best(study.best_file)
    assert (best.knobs, best.is_recipe) == ({}, True)


def test_a_table_of_0_1_0_is_read():
    table = read(DATA / "table.jsonl.gz")
    assert table.versions["autotune"] == "0.1.0"
    assert [len(several) for several in table.by_configuration().values()] == [1, 2]


@pytest.mark.parametrize(
    "words",
    [["show"], ["show", "--trial", "1"], ["show", "--why"], ["export"], ["report"], ["resume", "mlp"], ["sync"], ["explain"]],
    ids=" ".join,
)
def test_a_study_of_a_newer_version_is_refused_in_one_line(study, capsys, words):
    for file in (study.study_file, study.summary_file, *study.path.glob("trials/*/trial.json")):
        file.write_text(json.dumps({**json.loads(file.read_text()), "schema": 2, "new": {}}))
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "autotune: STUDY: made by a newer version of autotune, got 'mlp' (study record of schema 2, this version reads 1). "
        "Update autotune.\n"
    )
    assert main(["list", "--json"]) == 0
    assert "study record of schema 2" in capsys.readouterr().out


@pytest.mark.parametrize(("version", "is_newer"), [("0.10.0", True), ("1.0.0rc1", True), ("0.1.0", False), ("0.0.9", False)])
def test_unreadable_best_yaml_is_called_newer_only_if_its_version_is_newer(tmp_path, version, is_newer):
    file = tmp_path / "best.yaml"
    file.write_text(f"loader:\n  telepathy: true\nprovenance:\n  versions:\n    autotune: {version!r}\n")
    with pytest.raises(BadInput) as refused:
        read_best(file)
    first, *more = refused.value.problems
    assert first.startswith("loader.telepathy: not a knob")
    assert more == [f"BEST: made by a newer version of autotune, got {version!r} in {file}. Update autotune."] * is_newer


def test_a_table_of_a_newer_version_is_refused_in_one_line(tmp_path, capsys):
    import gzip

    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(b'{"format": "autotune table", "schema": 2}\n'))
    assert main(["replay", str(tmp_path / "t.jsonl.gz")]) == 2
    assert "TABLE: made by a newer version of autotune" in capsys.readouterr().err
