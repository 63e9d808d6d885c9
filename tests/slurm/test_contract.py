"""The contract of all launchers, on a real Slurm. Each test submits a job."""

import pytest

from autotune.launchers.base import Launcher
from autotune.testing.launcher_contract import LauncherContract
from tests.launchers.agents import ready
from tests.slurm.conftest import Make


class TestSlurmLauncher(LauncherContract):
    @pytest.fixture
    def launcher(self, make: Make) -> Launcher:
        return ready(make())
