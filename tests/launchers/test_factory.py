"""Each value of `launcher=` makes a launcher."""

import pytest

from autotune.config.command import CommandTemplate
from autotune.config.schema import LAUNCHERS, RAY, SLURM, StudyConfig
from autotune.launchers import make_launcher
from autotune.launchers.base import Launcher

COMMAND = CommandTemplate(parts=["true"])


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_allowed_name_creates_a_launcher(name):
    made = make_launcher(StudyConfig(launcher=name), COMMAND)
    try:
        assert isinstance(made, Launcher)
    finally:
        made.close()


@pytest.mark.parametrize("name", [SLURM, RAY])
def test_a_cluster_has_a_launcher_for_each_slot(name):
    config = StudyConfig(launcher=name)
    config.launch.slots = 3
    assert len(make_launcher(config, COMMAND).beside()) == 3


def test_unknown_launcher_name_is_refused():
    with pytest.raises(ValueError, match="nosuch"):
        make_launcher(StudyConfig(launcher="nosuch"), COMMAND)
