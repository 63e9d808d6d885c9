import pytest

from tests.report import made


@pytest.fixture(scope="session")
def complete(tmp_path_factory):
    """The folder of a study with a faster configuration and with all tables. Tests must not change it."""
    return made.complete(tmp_path_factory.mktemp("complete"))
