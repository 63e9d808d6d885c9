"""A study whose trials the tests start."""

import pytest

from tests.support.launcher_contract import trial_folder


@pytest.fixture
def folder(tmp_path):
    return trial_folder(tmp_path)


@pytest.fixture
def study(folder):
    return folder.parent.parent
