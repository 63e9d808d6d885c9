"""Runs the programs of `expectations.py` before the tests that examine them, two at a time if there is one worker."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.harness.conftest import served
from tests.programs.expectations import PROGRAMS, Program
from tests.programs.starting import Seen, look_at

NUM_AT_ONCE = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Program], Seen]]:
    """Returns a function that returns a program's three runs. The programs of all selected tests are started in advance."""
    chosen = [item.callspec.params.get("program") for item in request.session.items if hasattr(item, "callspec")]
    folder, here = tmp_path_factory.mktemp("matrix"), threading.local()

    def look(program: Program) -> Seen:
        return look_at(program, folder / program.name, here.forks)

    with served(tmp_path_factory) as server, contextlib.ExitStack() as ended:

        def begin() -> None:
            here.forks = ended.enter_context(server.forks())

        with ThreadPoolExecutor(NUM_AT_ONCE, initializer=begin) as pool:
            futures: dict[str, Future[Seen]] = {
                program.name: pool.submit(look, program) for program in PROGRAMS if program in chosen
            }
            yield lambda program: futures[program.name].result()
            pool.shutdown(cancel_futures=True)
