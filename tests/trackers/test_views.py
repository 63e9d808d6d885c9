"""The saved views of the MLflow experiment. tests/trackers/test_pages.py reads them in a browser."""

import base64
import dataclasses
import json
import zlib

import pytest

from autotune.knobs.catalogue import CATALOGUE
from autotune.records import Kind, Outcome, StudyRecord, TrialRecord
from autotune.trackers import views

FIRST = TrialRecord(number=0, kind=Kind.baseline, knobs={}, changed={}, outcome=Outcome.ok, value=9.0, unit="tokens")


def study(**changes) -> StudyRecord:
    space = {"loader.batch_size": {"interval": [16, 64], "log": True}, "compile.mode": {"choice": ["off"]}}
    return StudyRecord(**{"name": "s", "title": "gpt2", "command": [], "cwd": "/", "space": space, "started_at": 5.0} | changes)


def state(value: str) -> dict:
    """Decodes a view's state as MLflow 3.17 does."""
    packed = json.loads(value)["state"]
    assert packed.startswith("deflate;")
    return json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;"))))


def view(tags: dict[str, str], key: str) -> dict:
    return state(tags[views.TAG + key])


def test_program_has_a_table_view_and_a_failures_view():
    tags = views.tags(study(), FIRST, "7", {})
    table, failures = (view(tags, views.key(study()) + ending) for ending in ("", views.FAILURES))
    assert table["searchFilter"] == "tags.program = 'gpt2' AND tags.repeat = 'no'"
    assert (table["orderByKey"], table["orderByAsc"]) == ("tags.`order`", True)
    assert "metrics.`Tokens per second`" in table["selectedColumns"]
    assert failures["searchFilter"] == "tags.program = 'gpt2' AND attributes.status = 'FAILED'"


def test_only_knobs_that_are_searched_are_columns():
    columns = view(views.tags(study(), FIRST, "7", {}), views.key(study()))["selectedColumns"]
    assert [name for name in columns if name.startswith("params")] == ["params.`loader.batch_size`"]


@pytest.mark.parametrize("title", ["python train.py --name 'it''s'", 'echo "`x`"', "x" * 500])
def test_quotes_in_a_title_cannot_end_the_filter(title):
    made = views.program(study(title=title))
    assert not set("'\"`") & set(made)
    assert 0 < len(made) <= views.MAX_PROGRAM_CHARACTERS


def test_old_mlflow_reads_the_state_from_the_tag_itself():
    tags = views.tags(study(), FIRST, "7", {})
    for key, value in tags.items():
        if key.startswith(views.TAG):
            flat = json.loads(value)
            assert state(value).items() <= flat.items()


def test_views_fit_into_a_tag_of_old_mlflow():
    longest = sorted(CATALOGUE, key=len)[-20:]
    long = study(title="x" * 500, space={name: {"choice": [0, 1]} for name in longest})
    tags: dict[str, str] = {}
    for number in range(30):
        tags |= views.tags(dataclasses.replace(long, title=f"{number} {long.title}"), FIRST, "7" * 18, tags)
    assert max(map(len, tags.values())) <= 5000
    columns = view(tags, views.key(dataclasses.replace(long, title=f"0 {long.title}")))["selectedColumns"]
    assert 4 <= sum(name.startswith("params") for name in columns) <= 8


def test_existing_views_are_not_written_again():
    tags = views.tags(study(), FIRST, "7", {})
    assert views.tags(study(started_at=99.0), FIRST, "7", tags) == {}


def test_second_program_is_added_to_the_list_of_pages():
    tags = views.tags(study(), FIRST, "7", {})
    more = views.tags(study(title="resnet18"), FIRST, "7", tags)
    assert set(more) == {views.NOTE, *(views.TAG + views.key(study(title="resnet18")) + end for end in ("", views.FAILURES))}
    for named in (study(), study(title="resnet18")):
        assert f"(#/experiments/7/runs?viewStateShareKey={views.key(named)}&workflowType=machine_learning)" in more[views.NOTE]


@pytest.mark.parametrize("damaged", ["", "[]", '{"name": "x"}', '{"createdAt": "late", "name": "x"}'])
def test_damaged_view_of_another_program_is_left_out_of_the_list(damaged):
    other = f"{views.TAG}{views.ALL}-other"
    assert views.tags(study(), FIRST, "7", {other: damaged})[views.NOTE] == views.tags(study(), FIRST, "7", {})[views.NOTE]


def test_description_by_the_user_is_kept():
    assert views.NOTE not in views.tags(study(), FIRST, "7", {views.NOTE: "ours, do not touch"})
