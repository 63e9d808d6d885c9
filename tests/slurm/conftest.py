"""Starts one private Slurm for all tests in this folder; skips them if it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.config.schema import SlurmOptions
from autotune.launchers.slurm import SlurmLauncher
from tests.launchers.agents import place
from tests.launchers.rows import mark_thorough
from tests.slurm.private import PrivateSlurm, why_not
from tests.support.launcher_contract import SHORT, trial_folder
from tests.support.ports import free_port

# Tests of the contract with many sets of parameters. The first set always runs; the others are thorough.
ROWS = ("no_process_accepts", "another_attempt", "corrupt_result", "signal_is_named", "hang_ends")
# Tests of the contract whose result could depend on Slurm. They always run; the others are thorough.
ALWAYS = (
    "hostile_paths", "cannot_be_started", "whole_process_tree", "all_ranks", "exit_without", "signal_is_named",
    "ignore_sigterm", "stop_ends", "newest_complete_line", "short_tail", "masked",
)  # fmt: skip
Make = Callable[..., SlurmLauncher]


@pytest.fixture(scope="session")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    if why := why_not():
        pytest.skip(why)
    made = PrivateSlurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.stop()


def connect(slurm: PrivateSlurm, patch: pytest.MonkeyPatch) -> None:
    """Makes Slurm's commands talk to the private Slurm."""
    for name, value in slurm.environment.items():
        patch.setenv(name, value)
    patch.delenv("SLURM_JOB_ID", raising=False)
    slurm.resume_nodes()


@pytest.fixture
def slurm(_slurm: PrivateSlurm, monkeypatch: pytest.MonkeyPatch) -> PrivateSlurm:
    """The private Slurm. During the test, Slurm's commands talk to it."""
    connect(_slurm, monkeypatch)
    return _slurm


@pytest.fixture
def make(slurm: PrivateSlurm, tmp_path: Path) -> Iterator[Make]:
    """Makes launchers with the given Slurm options; closes them after the test."""
    made: list[SlurmLauncher] = []

    def make_launcher(where: Any = None, **options: Any) -> SlurmLauncher:
        made.append(SlurmLauncher(SlurmOptions(**options), where or place(tmp_path), graces=SHORT))
        return made[-1]

    yield make_launcher
    for launcher in made:
        launcher.close()
    assert slurm.is_idle()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The path of a trial's folder, which does not exist yet."""
    return trial_folder(tmp_path)


@pytest.fixture
def meeting(slurm: PrivateSlurm) -> dict[str, str]:
    """Returns environment variables of the ranks, which meet at a free port of this host, where both nodes run."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow tests that show nothing more about Slurm as thorough."""
    mark_thorough(items, Path(__file__).parent, ROWS, ALWAYS)
