"""The contract of all launchers, on a real Ray cluster. All tests share one actor, as the trials of a study do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.launchers.base import Launcher
from tests.launchers.agents import place, ready
from tests.ray.conftest import launcher_on
from tests.ray.private import PrivateRay
from tests.support.launcher_contract import SharedLauncherContract


class TestRayLauncher(SharedLauncherContract):
    @pytest.fixture(scope="class")
    @classmethod
    def launcher(cls, ray: PrivateRay, study: Path) -> Iterator[Launcher]:
        made = launcher_on(ray, place(study.parent))
        yield ready(made)
        made.close()
