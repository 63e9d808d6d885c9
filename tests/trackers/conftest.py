"""MLflow stores and servers, which tests share because a new store or a new server takes five seconds."""

import contextlib
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.report.writing import write_report
from autotune.trackers import mlflow, store
from tests.support.studies import make_study
from tests.trackers.servers import MlflowServer, Ui


@contextlib.contextmanager
def quiet_environment() -> Iterator[None]:
    """Removes the user's server from the environment; at the end, undoes changes that a tracker has made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(store.URI_VARIABLE, raising=False)
        for name in (*mlflow.CLIENT_ENVIRONMENT, mlflow.TIMEOUT_VARIABLE):
            patch.setenv(name, "1")
        yield


@pytest.fixture(autouse=True)
def no_server_of_the_user() -> Iterator[None]:
    with quiet_environment():
        yield


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("store")
    mlflow.MlflowTracker(store.embedded_uri(runs), runs)._connect()
    return store.store_file(runs)


def runs_folder(folder: Path, empty_store: Path) -> Path:
    """Makes a runs folder with an empty embedded store; returns its path."""
    folder.mkdir()
    store.store_file(folder).write_bytes(empty_store.read_bytes())
    # The store contains the path of its folder. In another folder, `sync` refuses it.
    with contextlib.closing(sqlite3.connect(store.store_file(folder))) as copy:
        copy.execute("UPDATE experiments SET artifact_location = ?", [store.artifacts_path(folder).as_uri()])
        copy.commit()
    return folder


@pytest.fixture
def runs(tmp_path: Path, empty_store: Path) -> Path:
    return runs_folder(tmp_path / "runs", empty_store)


@pytest.fixture(scope="session")
def new_server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Callable[[], MlflowServer]]:
    """Starts servers with empty stores; stops them at the end of the session."""
    started: list[MlflowServer] = []

    def make() -> MlflowServer:
        server = MlflowServer(tmp_path_factory.mktemp("server"))
        server.store.write_bytes(empty_store.read_bytes())
        started.append(server)
        server.start()
        return server

    yield make
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(new_server: Callable[[], MlflowServer]) -> MlflowServer:
    """A working server that all tests share."""
    return new_server()


@pytest.fixture(scope="session")
def ui(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Ui]:
    """A running `autotune ui` that all tests share. It shows the study resnet18."""
    folder = tmp_path_factory.mktemp("ui")
    runs = runs_folder(folder / "runs", empty_store)
    study = make_study(runs)
    write_report(study, study.read_summary())
    make_study(runs, name="elsewhere").write_config("tracker: {uri: 'http://127.0.0.1:9'}")
    shown = Ui(folder)
    yield shown
    if shown.process.poll() is None:
        shown.end(signal.SIGTERM)
