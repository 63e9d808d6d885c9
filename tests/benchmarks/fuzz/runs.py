"""Runs many cases of a kind; the same seed gives the same cases."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.benchmarks.fuzz.cases import KINDS
from tests.benchmarks.fuzz.damage import Case
from tests.benchmarks.fuzz.place import LIMIT_S, Answer, FuzzPlace

MEMORY = "/dev/shm"  # nothing waits for a disk there
HARD_LIMIT_S = 3 * LIMIT_S
FORK = multiprocessing.get_context("fork")


@dataclass
class Tally:
    """The answers to the cases of a kind, the cases that failed, and whether the user stopped the run."""

    answers: list[Answer] = field(default_factory=list)
    failed: list[tuple[Case, Answer]] = field(default_factory=list)
    is_stopped: bool = False

    def add(self, case: Case, answer: Answer) -> None:
        """Counts a case."""
        self.answers.append(answer)
        if answer.problem:
            self.failed.append((case, answer))


def fuzz(place: FuzzPlace, kind: str, cases: int, number: int = 0) -> Tally:
    """Returns the answers to `cases` cases of a kind; `number` is the seed."""
    tally = Tally()
    _each(kind, cases, number, lambda case: tally.add(case, place.run(case)))
    return tally


def fuzz_apart(place: FuzzPlace, kind: str, cases: int, number: int = 0, *, max_s: float = math.inf) -> Tally:
    """Returns the answers to the cases that a child process runs in `max_s` seconds, or until this process is interrupted.

    A case fails if it kills the child, or if it runs beyond its limit because a C library does not return.
    """
    receiving, sending = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_send_each, args=(sending, place, kind, cases, number))
    child.start()
    sending.close()
    tally = Tally()
    try:
        _collect(receiving, tally, time.monotonic() + max_s)
    except KeyboardInterrupt:
        tally.is_stopped = True
    finally:
        child.kill()
        child.join()
    return tally


def _each(kind: str, cases: int, number: int, run: Callable[[Case], None]) -> None:
    phases, checks = [Phase.generate], [*HealthCheck]
    options = settings(max_examples=cases, database=None, deadline=None, phases=phases, suppress_health_check=checks)
    seed(number)(options(given(KINDS[kind])(run)))()


def _send_each(sending: Connection, place: FuzzPlace, kind: str, cases: int, number: int) -> None:
    def run(case: Case) -> None:
        sending.send(case)
        sending.send(place.run(case))

    os.setsid()  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _each(kind, cases, number, run)


def _collect(receiving: Connection, tally: Tally, until_s: float) -> None:
    case = None
    while (left_s := until_s - time.monotonic()) > 0:
        if not receiving.poll(min(left_s, HARD_LIMIT_S)):
            if case and left_s > HARD_LIMIT_S:
                tally.add(case, _lost("hang: no signal ended it"))
            return
        try:
            sent = receiving.recv()
        except EOFError:
            if case:
                tally.add(case, _lost("died"))
            return
        if isinstance(sent, Case):
            case = sent
        elif case:
            tally.add(case, sent)
            case = None


def _lost(cause: str) -> Answer:
    return Answer(seconds=HARD_LIMIT_S, problem=cause, cause=cause)


@contextmanager
def fuzz_place() -> Iterator[FuzzPlace]:
    """Yields a place, which is removed afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        try:
            yield FuzzPlace(Path(folder))
        finally:
            os.chdir(before)
