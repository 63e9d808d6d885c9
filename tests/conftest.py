"""Set-up for all tests."""

import functools
import gc
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from autotune.cli import app
from autotune.config import compose
from tests.compositions import copied, parsed, yaml_of

# Under `nohup`, or in the background of a script, the tests inherit ignored signals. They would pass this on to the processes
# whose reaction to these signals they test.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = ("tests/ray/", "tests/trackers/", "tests/slurm/")  # one worker runs all tests of such a folder: they share a server
# Folders whose tests start real programs, a browser or whole studies. They begin first, in this order, so that no long file is
# left for a single worker.
LONG = [
    "ray", "programs", "trackers", "slurm", "faults", "packaging", "harness", "launchers", "api", "apply", "export", "report",
    "replay", "study", "cli",
]  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Spares what the collection has made from garbage collection: none of it can be freed before the tests end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distributes files as `--dist loadfile` does, except that folders in `SHARED` stay together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in SHARED if nodeid.startswith(folder)), super()._split_scope(nodeid))

    config.option.loadscopereorder = False  # `pytest_collection_modifyitems` gives the order
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """If several workers share the tests, puts folders in `LONG` first, then files with many tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    number = Counter(item.path for item in items)
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: (ranks.get(item.path.parent.name, len(ranks)), -number[item.path], str(item.path)))


@pytest.fixture(autouse=True, scope="session")
def _compositions_are_copied() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_hydra", copied)
        patch.setattr(compose, "_yaml", yaml_of)
        patch.setattr(OverridesParser, "parse_override", lambda self, text: parsed(text))
        yield


@pytest.fixture(autouse=True, scope="session")
def _command_line_is_built_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "build", functools.cache(app.build))
        yield


@pytest.fixture(autouse=True, scope="session")
def _disk_is_not_waited_for() -> Iterator[None]:
    """Saves waiting for the disk after every document, which takes milliseconds on some machines. Other processes do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
