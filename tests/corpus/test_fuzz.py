"""A few hundred damaged inputs of every kind: each is used or refused. `python -m tests.benchmarks.fuzz` tries thousands."""

import os
import subprocess
import time

import pytest

from tests.benchmarks.fuzz import place as places
from tests.benchmarks.fuzz.cases import KINDS
from tests.benchmarks.fuzz.damage import Case
from tests.benchmarks.fuzz.runs import fuzz, fuzz_place

CASES = 40  # of each kind


@pytest.fixture(scope="module")
def place():
    with fuzz_place() as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_input_is_used_or_refused(place, kind):
    tally = fuzz(place, kind, CASES)
    assert [(answer.problem, case) for case, answer in tally.failed] == []
    assert len(tally.answers) == CASES


def test_a_part_that_has_to_end_keeps_its_cases(place):
    assert fuzz(place, "journals", 5, max_s=0.0).answers == []
    assert len(fuzz(place, "journals", 5, max_s=60.0).answers) == 5


def _write(path):
    with open(path, "w", encoding="utf-8") as file:
        file.write("x")
    return 0


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (lambda: 0, ""),
        (lambda: 1 / 0, "traceback: ZeroDivisionError at cli/app.py"),
        (lambda: 7, "exit status"),
        (lambda: 2, "unclear message"),
        (lambda: os.system("touch canary-sang"), "code executed"),
        (lambda: subprocess.run(["true"], check=False).returncode, "started a process"),
        (lambda: _write("/nosuch/file"), "written outside"),
        (lambda: _write("canary/file"), "files changed"),
        (lambda: time.sleep(5), "hang: Hang"),
        (lambda: print(places.SECRET), "secret shown"),
    ],
)
def test_what_must_not_happen_is_noticed(place, monkeypatch, broken, cause):
    monkeypatch.setattr("autotune.cli.show.print_studies", lambda *_, **__: broken())
    monkeypatch.setattr(places, "LIMIT_S", 0.5)
    found = place.run(Case(words=["list"])).cause
    assert found.startswith(cause)
    assert bool(found) == bool(cause)
