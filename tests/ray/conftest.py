"""Starts one private Ray cluster for all tests in this folder; skips them if it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.config.schema import RayOptions
from autotune.launchers.ray.launcher import RayLauncher
from tests.launchers.agents import place
from tests.launchers.rows import mark_thorough
from tests.ray.private import PrivateRay, why_not
from tests.support.launcher_contract import SHORT, trial_folder

# Tests of the contract whose result could depend on Ray. They always run; the others are thorough.
ALWAYS = ("hostile_paths", "signal_is_named", "ignore_sigterm", "killed_process_between")
Make = Callable[..., RayLauncher]


@pytest.fixture(scope="session")
def ray() -> Iterator[PrivateRay]:
    """The private Ray cluster."""
    if why := why_not():
        pytest.skip(why)
    made = PrivateRay()
    yield made
    made.stop()


def launcher_on(ray: PrivateRay, where: Any, **options: Any) -> RayLauncher:
    """Returns a launcher on a Ray cluster, with the given Ray options."""
    return RayLauncher(RayOptions(**{"address": ray.address, **options}), where, graces=SHORT)


@pytest.fixture
def make(ray: PrivateRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes launchers with the given Ray options; closes them after the test. Fails if a launcher has started a cluster."""
    made: list[RayLauncher] = []
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))

    def make_launcher(where: Any = None, **options: Any) -> RayLauncher:
        made.append(launcher_on(ray, where or place(tmp_path), **options))
        return made[-1]

    yield make_launcher
    for launcher in made:
        launcher.close()
    assert not (tmp_path / "ray").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The path of a trial's folder, which does not exist yet."""
    return trial_folder(tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow tests that show nothing more about Ray as thorough."""
    mark_thorough(items, Path(__file__).parent, ALWAYS, ALWAYS)
