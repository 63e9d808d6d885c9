"""Sockets and semaphores that loader workers leave if their trial ends early."""

import os
import tempfile

import pytest

from tests.harness.conftest import Trial
from tests.support.rows import more


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["forkserver", *more("spawn")])
def test_semaphores_of_workers_that_are_not_forked_are_removed_with_the_trial(trial: Trial, method: str) -> None:
    run = trial("workers.py", f"context={method}", mode="inspect", is_fresh=True)
    assert run.result().status == "measured"
    assert "leaked" not in run.stderr  # what multiprocessing's resource tracker says if it has to remove them


@pytest.mark.parametrize("method", ["fork", *more("forkserver")])
def test_a_measured_trial_with_workers_leaves_no_sockets(trial: Trial, method: str) -> None:
    with tempfile.TemporaryDirectory() as place:  # a socket's path has at most 107 characters
        run = trial("workers.py", f"context={method}", mode="inspect", env={"TMPDIR": place})
        assert run.result().status == "measured"
        assert [name for name in os.listdir(place) if name.startswith("pymp-")] == []
