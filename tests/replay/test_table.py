import gzip
import json

import pytest

from autotune.errors import BadInput
from autotune.records import Outcome
from autotune.replay.table import key_of, read, write
from tests.replay.tables import BEST, make_table


def test_table_survives_a_round_trip_and_is_written_deterministically(tmp_path):
    table = make_table(noise_frac=0.02)
    write(table, tmp_path / "a.jsonl.gz")
    write(read(tmp_path / "a.jsonl.gz"), tmp_path / "b.jsonl.gz")
    assert read(tmp_path / "a.jsonl.gz") == table
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_measurements_are_grouped_by_configuration_and_true_differs_from_1():
    groups = make_table().by_configuration()
    assert {len(group) for group in groups.values()} == {3}
    assert [one.round for one in groups[key_of(BEST)]] == [1, 2, 3]
    assert key_of({"a": True}) != key_of({"a": 1})
    oom = {one.outcome for one in groups[key_of({"loader.batch_size": 128})]}
    assert oom == {Outcome.host_oom}


@pytest.mark.parametrize(
    "content",
    [
        b"not gzip",
        gzip.compress(b"not json\n", mtime=0),
        gzip.compress(b"{}\n", mtime=0),
        gzip.compress(b"", mtime=0),
        gzip.compress(json.dumps({"format": "autotune table", "schema": 0}).encode(), mtime=0),
        gzip.compress(json.dumps({"format": "autotune table", "schema": 1}).encode(), mtime=0),
        gzip.compress(b"{}\n", mtime=0)[:-4],
    ],
)
def test_file_that_is_not_a_table_is_refused_with_its_name(tmp_path, content):
    file = tmp_path / "t.jsonl.gz"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"TABLE: cannot be read, got '.*t\.jsonl\.gz'"):
        read(file)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1, 2]", "line 3 is not a measurement"),
        ('{"a": 1}', "line 3 is not a measurement"),
        ('{"outcome": "ok", "value": NaN}', "NaN is not a number"),
        ('{"outcome": "ok", "value": 1e999}', "1e999 is too large"),
        ('{"outcome": "good"}', "outcome: 'good' is not a valid Outcome"),
        ('{"outcome": "ok", "changed": {"a": [1]}}', "changed: list instead of str"),
        ('{"outcome": "ok", "ci": [1]}', "ci: "),
    ],
)
def test_error_names_the_problem_of_a_damaged_line(tmp_path, line, problem):
    write(make_table(), tmp_path / "t.jsonl.gz")
    lines = gzip.decompress((tmp_path / "t.jsonl.gz").read_bytes()).decode().splitlines()
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines[:2], line, *lines[3:]]).encode()))
    with pytest.raises(BadInput, match=problem):
        read(tmp_path / "t.jsonl.gz")


def test_unknown_field_of_a_later_version_is_ignored(tmp_path):
    write(make_table(), tmp_path / "t.jsonl.gz")
    lines = gzip.decompress((tmp_path / "t.jsonl.gz").read_bytes()).decode().splitlines()
    later = [json.dumps({**json.loads(line), "later": 1}) for line in lines]
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress("\n".join(later).encode()))
    assert read(tmp_path / "t.jsonl.gz") == make_table()
