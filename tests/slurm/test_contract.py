"""The contract of all launchers, on a real Slurm. Each test submits a job."""

import pytest

from autotune.launchers.base import Launcher
from tests.launchers.agents import ready
from tests.slurm.conftest import Make
from tests.support.launcher_contract import LauncherContract


class TestSlurmLauncher(LauncherContract):
    @pytest.fixture
    def launcher(self, make: Make) -> Launcher:
        return ready(make())
