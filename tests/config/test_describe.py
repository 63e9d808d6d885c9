"""The list of keys that `autotune run --help` ends with."""

from __future__ import annotations

from autotune.config.describe import documented, overview
from autotune.config.keys import LEAVES
from autotune.config.schema import DataConfig


def test_every_key_is_listed_with_its_default_or_within_its_group() -> None:
    rows = {row.key: row.meaning for row in overview()}
    for key in LEAVES:
        group, _, name = key.rpartition(".")
        is_alone = any(row.startswith(f"{key}=") for row in rows) or key in ("env", "provenance")
        assert is_alone or name in rows[f"{group}.*"] or group == "measure.finals", key
    assert "study.budget.minutes=8" in rows
    assert "env.NAME=VALUE" in rows
    assert "resnet18" in rows["model=NAME"]


def test_every_row_has_a_meaning_of_several_words() -> None:
    assert all(len(row.meaning.split()) > 1 for row in overview())


def test_meanings_are_the_docstrings_joined_to_one_line() -> None:
    assert documented(DataConfig)["root"].endswith("For `photos`: where the photos are stored. For `text`: text files.")


def test_row_of_search_space_lists_the_search_spaces() -> None:
    meaning = next(row.meaning for row in overview() if row.key.startswith("search_space="))
    assert "search_spaces/ (default, full, loader, memory, nccl, quick)" in meaning
