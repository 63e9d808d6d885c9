"""The contract of all launchers, on a real Ray cluster. Each test starts a broker, an actor and an agent."""

import pytest

from autotune.launchers.base import Launcher
from tests.launchers.agents import ready
from tests.ray.conftest import Make
from tests.support.launcher_contract import LauncherContract


class TestRayLauncher(LauncherContract):
    @pytest.fixture
    def launcher(self, make: Make) -> Launcher:
        return ready(make())
