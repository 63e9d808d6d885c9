import dataclasses
import errno
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.trackers import store
from tests.support.studies import make_study


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv(store.URI_VARIABLE, raising=False)
    return make_study(tmp_path)


def test_default_is_the_embedded_store_of_the_runs_folder(tmp_path, folder):
    assert store.chosen_uri(tmp_path, folder=folder) == f"sqlite:///{tmp_path}/mlflow.db"


def test_environment_replaces_the_embedded_store(tmp_path, folder, monkeypatch):
    monkeypatch.setenv(store.URI_VARIABLE, "http://server:5000")
    assert store.chosen_uri(tmp_path, folder=folder) == "http://server:5000"


def test_address_of_the_study_takes_precedence_over_the_environment(tmp_path, folder, monkeypatch):
    monkeypatch.setenv(store.URI_VARIABLE, "http://server:5000")
    folder.config_file.write_text("tracker:\n  uri: http://own:1\n", encoding="utf-8")
    assert store.chosen_uri(tmp_path, folder=folder) == "http://own:1"


@pytest.mark.parametrize(
    "damage",
    [b"\xff\xfe", b"tracker: [", b"- 1", b"[" * 1000, b"tracker: {uri: [1]}"],
    ids=["bytes", "cut off", "a list", "deep", "no text"],
)
def test_damaged_configuration_falls_back_to_the_embedded_store(tmp_path, folder, damage):
    folder.config_file.write_bytes(damage)
    assert store.study_uri(folder) is None
    assert store.chosen_uri(tmp_path, folder=folder) == store.embedded_uri(tmp_path)


def test_requested_address_takes_precedence_over_the_study(tmp_path, folder):
    folder.config_file.write_text("tracker:\n  uri: http://own:1\n", encoding="utf-8")
    assert store.chosen_uri(tmp_path, asked="http://asked:2", folder=folder) == "http://asked:2"


def test_experiment_has_an_absolute_path_on_databricks_only(folder):
    assert store.chosen_experiment("sqlite:///mlflow.db", folder) == "autotune"
    assert store.chosen_experiment("databricks://profile", folder) == "/Shared/autotune"
    folder.config_file.write_text("tracker:\n  experiment: /Users/me/x\n", encoding="utf-8")
    assert store.chosen_experiment("databricks", folder) == "/Users/me/x"


def test_environment_references_are_resolved(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("SERVER", "http://secret:3")
    folder.config_file.write_text("tracker:\n  uri: ${oc.env:SERVER}\n", encoding="utf-8")
    assert store.chosen_uri(tmp_path, folder=folder) == "http://secret:3"


@pytest.mark.parametrize(
    ("configured", "is_same"),
    [
        ("null", True),
        ("http://***@host:3", True),
        ("${oc.env:SERVER}", True),
        ("http://host:3", False),
        ("http://***@host:4", False),
        ("${oc.env:UNSET}", False),
        ("none", False),
    ],
)
def test_stored_address_is_recognised_although_its_credentials_are_not_stored(folder, monkeypatch, configured, is_same):
    monkeypatch.setenv("SERVER", "http://me:s3cret@host:3")
    folder.config_file.write_text(f"tracker:\n  uri: {configured}\n", encoding="utf-8")
    assert store.may_use(folder, "http://me:s3cret@host:3") == is_same


def test_relative_file_of_a_study_is_recognised_if_it_is_typed_again(folder, monkeypatch, tmp_path):
    folder.write_study(dataclasses.replace(folder.read_study(), cwd=str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    folder.config_file.write_text("tracker:\n  uri: sqlite:///mine.db\n", encoding="utf-8")
    assert store.may_use(folder, "sqlite:///mine.db")
    assert not store.may_use(folder, "sqlite:///other.db")


def test_store_is_made_once_under_a_temporary_name(tmp_path):
    made = []

    def make(uri):
        assert not store.store_file(tmp_path).exists()
        path = uri.removeprefix("sqlite:///")
        assert path != str(store.store_file(tmp_path))
        made.append(uri)
        with open(path, "w", encoding="utf-8") as file:
            file.write("whole")

    assert store.ensure_store(tmp_path, make) == store.ensure_store(tmp_path, make) == store.embedded_uri(tmp_path)
    assert len(made) == 1
    assert store.store_file(tmp_path).read_text() == "whole"


def test_failed_creation_leaves_no_store(tmp_path):
    def make(_):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.ensure_store(tmp_path, make)
    assert not store.store_file(tmp_path).exists()


def test_only_one_writer_at_a_time(folder):
    with store.only_writer(folder) as first, store.only_writer(folder) as second:
        assert (first, second) == (True, False)
    with store.only_writer(folder) as third:
        assert third


def test_study_is_mirrored_on_a_file_system_without_locks(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store.fcntl, "flock", refuse)
    with store.only_writer(folder) as is_alone:
        assert is_alone


@pytest.mark.parametrize(
    ("variable", "value", "chosen"),
    [
        (store.URI_VARIABLE, "https://me:pw@host/x", "https://me:pw@host/x"),
        (store.USER_VARIABLE, "me", "https://host/x"),  # the client of MLflow adds the credentials
    ],
)
def test_credentials_that_are_not_stored_come_from_the_environment(tmp_path, folder, monkeypatch, variable, value, chosen):
    folder.config_file.write_text("tracker:\n  uri: https://***@host/x\n", encoding="utf-8")
    monkeypatch.setenv(variable, value)
    assert store.chosen_uri(tmp_path, folder=folder) == chosen


def test_missing_credentials_are_asked_for(tmp_path, folder, monkeypatch):
    folder.config_file.write_text("tracker:\n  uri: https://***@host/x\n", encoding="utf-8")
    monkeypatch.setenv(store.URI_VARIABLE, "https://me:pw@another-host")
    with pytest.raises(BadInput, match=r"tracker\.uri: needs credentials, which are not stored"):
        store.chosen_uri(tmp_path, folder=folder)


def test_message_names_a_reference_to_an_unset_variable(tmp_path, folder, monkeypatch):
    monkeypatch.delenv("SERVER", raising=False)
    folder.config_file.write_text("tracker:\n  uri: ${oc.env:SERVER}\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"got '\$\{oc\.env:SERVER\}'"):
        store.chosen_uri(tmp_path, folder=folder)
    folder.config_file.write_text("tracker:\n  uri: ${oc.env:SERVER,http://default:1}\n", encoding="utf-8")
    assert store.chosen_uri(tmp_path, folder=folder) == "http://default:1"


def test_leftovers_of_a_killed_store_creation_are_removed(tmp_path):
    (tmp_path / ".mlflow.db.99").write_text("half")
    store.ensure_store(tmp_path, lambda uri: Path(uri.removeprefix("sqlite:///")).touch())
    assert not list(tmp_path.glob(".mlflow.db.*"))


def test_experiment_may_refer_to_a_variable_or_to_another_key(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("TEAM", "blue")
    text = "model:\n  name: net\nstudy:\n  name: null\ntracker:\n  uri: sqlite:////${model.name}.db\n  experiment: "
    folder.config_file.write_text(text + "${oc.env:TEAM}-${model.name}\n", encoding="utf-8")
    assert store.chosen_experiment("http://s:1", folder) == "blue-net"
    assert store.chosen_uri(tmp_path, folder=folder) == "sqlite:////net.db"
    monkeypatch.delenv("TEAM")
    with pytest.raises(BadInput, match=r"tracker\.experiment: a variable that is not set, got '\$\{oc\.env:TEAM\}'"):
        store.chosen_experiment("http://s:1", folder)
    folder.config_file.write_text(text + "${study.name}\n", encoding="utf-8")
    assert store.chosen_experiment("http://s:1", folder) == "autotune"


def test_relative_sqlite_file_lies_where_the_study_was_started(tmp_path, folder):
    folder.write_study(dataclasses.replace(folder.read_study(), cwd=str(tmp_path)))
    for configured, chosen in (("mlflow.db", f"{tmp_path}/mlflow.db"), ("/srv/x.db", "/srv/x.db"), (":memory:", ":memory:")):
        folder.config_file.write_text(f"tracker:\n  uri: 'sqlite:///{configured}'\n", encoding="utf-8")
        assert store.chosen_uri(tmp_path / "elsewhere", folder=folder) == f"sqlite:///{chosen}"
    folder.write_study(dataclasses.replace(folder.read_study(), cwd=str(tmp_path / "gone")))
    folder.config_file.write_text("tracker:\n  uri: sqlite:///mlflow.db\n", encoding="utf-8")
    assert store.study_uri(folder) == "sqlite:///mlflow.db"
