"""Every name that `launcher=` allows makes a launcher."""

import pytest

from autotune.config.schema import LAUNCHERS
from autotune.launchers import make_launcher
from autotune.launchers.base import Launcher


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_name_that_is_allowed_makes_a_launcher(name):
    made = make_launcher(name)
    try:
        assert isinstance(made, Launcher)
    finally:
        made.close()


def test_a_name_that_is_not_allowed_makes_none():
    with pytest.raises(ValueError, match="nosuch"):
        make_launcher("nosuch")
