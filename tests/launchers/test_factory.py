"""Each value of `launcher=` makes a launcher."""

import pytest

from autotune.config.command import CommandTemplate
from autotune.config.schema import LAUNCHERS, StudyConfig
from autotune.launchers import make_launcher
from autotune.launchers.base import Launcher

COMMAND = CommandTemplate(parts=["true"])


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_name_that_is_allowed_makes_a_launcher(name):
    made = make_launcher(StudyConfig(launcher=name), COMMAND)
    try:
        assert isinstance(made, Launcher)
    finally:
        made.close()


def test_a_name_that_is_not_allowed_makes_none():
    with pytest.raises(ValueError, match="nosuch"):
        make_launcher(StudyConfig(launcher="nosuch"), COMMAND)
