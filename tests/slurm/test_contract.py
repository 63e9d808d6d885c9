"""The contract of all launchers, on a real Slurm. All tests share one job, as the trials of a study do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.config.schema import SlurmOptions
from autotune.launchers.base import Launcher
from autotune.launchers.slurm import SlurmLauncher
from tests.launchers.agents import place, ready
from tests.slurm.conftest import connect
from tests.slurm.private import PrivateSlurm
from tests.support.launcher_contract import SHORT, SharedLauncherContract


class TestSlurmLauncher(SharedLauncherContract):
    @pytest.fixture(scope="class")
    @classmethod
    def launcher(cls, _slurm: PrivateSlurm, study: Path) -> Iterator[Launcher]:
        with pytest.MonkeyPatch.context() as patch:
            connect(_slurm, patch)
            made = SlurmLauncher(SlurmOptions(), place(study.parent), graces=SHORT)
            yield ready(made)
            made.close()
            assert _slurm.is_idle()
