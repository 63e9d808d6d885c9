"""Runs many cases of a kind, the same ones for the same seed."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.benchmarks.fuzz.cases import KINDS
from tests.benchmarks.fuzz.damage import Case
from tests.benchmarks.fuzz.place import Answer, FuzzPlace

MEMORY = "/dev/shm"  # nothing waits for a disk there


@dataclass
class Tally:
    """The answers to the cases of a kind, and the cases that failed."""

    answers: list[Answer] = field(default_factory=list)
    failed: list[tuple[Case, Answer]] = field(default_factory=list)

    def add(self, case: Case, answer: Answer) -> None:
        """Counts a case."""
        self.answers.append(answer)
        if answer.problem:
            self.failed.append((case, answer))


def fuzz(place: FuzzPlace, kind: str, cases: int, number: int = 0, *, max_s: float = math.inf) -> Tally:
    """Returns the answers to `cases` cases of a kind, or to those of the first `max_s` seconds; `number` is the seed."""
    tally, until_s = Tally(), time.monotonic() + max_s

    @seed(number)
    @settings(max_examples=cases, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(KINDS[kind])
    def each(case: Case) -> None:
        if time.monotonic() > until_s:
            raise KeyboardInterrupt  # hypothesis would take another exception for a failed case
        tally.add(case, place.run(case))

    with suppress(KeyboardInterrupt):
        each()
    return tally


@contextmanager
def fuzz_place() -> Iterator[FuzzPlace]:
    """Yields a place that is gone afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        try:
            yield FuzzPlace(Path(folder))
        finally:
            os.chdir(before)
