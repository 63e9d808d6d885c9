"""Set-up for all tests."""

import signal
from collections.abc import Iterator

import pytest

from autotune.config import compose
from tests.compositions import copied

# Under `nohup`, or in the background of a script, the tests inherit ignored signals. They would pass this on to the processes
# whose reaction to these signals they test.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _compositions_are_copied() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_hydra", copied)
        yield
