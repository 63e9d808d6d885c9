"""A report and `show --why` leave out the invalid parts of tables that a stranger wrote for an explained trial."""

import json
import shutil

import pytest

from autotune.cli.main import main
from autotune.explain.tables import COLUMNS, read_tables
from autotune.records import Kind


@pytest.fixture
def explained(complete, tmp_path, monkeypatch):
    """The folders of the tables of a study, which may be changed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(complete.path, "runs/s")
    traced = [trial for trial in complete.read_trials() if trial.kind is Kind.explain and trial.origin == "trace"]
    return [tmp_path / f"runs/s/trials/{trial.number:04d}" for trial in traced]


def change(folders, name, changed):
    """Replaces a document by `changed(document)`, in all folders."""
    for file in (folder / "explain" / f"{name}.json" for folder in folders):
        file.write_text(json.dumps(changed(json.loads(file.read_text()))))


def used(capsys):
    """Checks that the commands that read the tables work, and returns what they print."""
    for words in (["report", "s", "-o", "-"], ["show", "s", "--why"]):
        assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("value", [None, 0, [None], [{}], [[1]], 1e300], ids=repr)
def test_index_without_a_list_of_tables_is_ignored_by_the_commands(explained, capsys, value):
    change(explained, "tables", lambda index: {**index, "tables": value})
    used(capsys)
    with pytest.raises(ValueError, match=r"tables\.json: tables"):
        read_tables(explained[0])


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("stages", {"stage": None}),
        ("stages", {"where": {"a": 1}}),
        ("stages", {"workers_needed": "many"}),
        ("roofline", None),
        ("roofline", {"busy_frac": 10**400}),
        ("roofline", {"dtype": [1]}),
        ("breakdown", {"seconds": None}),
        ("breakdown", {"category": 7}),
        ("memory", {"bytes": "all"}),
        ("memory_timeline", {"reserved_bytes": None}),
        ("operators", {"rank": "0"}),
    ],
)
def test_table_with_a_cell_of_the_wrong_type_counts_as_absent(explained, capsys, name, row):
    change(explained, name, lambda table: {**table, "rows": [row and {**one, **row} for one in table["rows"]]})
    assert f"{name}.json cannot be read: rows.0" in read_tables(explained[0]).absent[name]
    used(capsys)


@pytest.mark.parametrize("name", ["stages", "roofline", "breakdown", "memory", "memory_timeline", "operators"])
def test_table_without_one_of_its_columns_counts_as_absent(explained, capsys, name):
    files = [folder / "explain" / f"{name}.json" for folder in explained]
    whole = [file.read_text() for file in files]
    for column in COLUMNS[name]:
        for file, text in zip(files, whole, strict=True):
            file.write_text(text)
        change(explained, name, lambda table, column=column: _without(table, column))
        assert f"{name}.json cannot be read: rows.0" in read_tables(explained[0]).absent[name], column
    used(capsys)


def _without(table, column):
    columns = {name: text for name, text in table["columns"].items() if name != column}
    return {**table, "columns": columns, "rows": [{name: row[name] for name in columns} for row in table["rows"]]}


def test_tables_with_unknown_keys_are_read(explained, capsys):
    change(explained, "stages", lambda table: {**table, "new": 1, "rows": [{**row, "new": [1]} for row in table["rows"]]})
    assert read_tables(explained[0]).rows("stages")
    used(capsys)
