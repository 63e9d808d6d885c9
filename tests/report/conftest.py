import pytest

from tests.report import made


@pytest.fixture(scope="session")
def complete(tmp_path_factory):
    """The folder of a study that found something, with all tables. Tests only read it."""
    return made.complete(tmp_path_factory.mktemp("complete"))
