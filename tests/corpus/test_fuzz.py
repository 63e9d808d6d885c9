"""Damaged inputs of every kind are used or refused: a few hundred here, thousands in `python -m tests.benchmarks.fuzz`."""

import os
import subprocess
import sys
import time

import pytest

from tests.benchmarks.fuzz import place as places
from tests.benchmarks.fuzz.cases import KINDS
from tests.benchmarks.fuzz.damage import Case
from tests.benchmarks.fuzz.runs import fuzz, fuzz_place

CASES = 15  # of each kind


@pytest.fixture(scope="module")
def place():
    with fuzz_place() as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_input_is_used_or_refused(place, kind):
    tally = fuzz(place, kind, CASES)
    assert [(answer.problem, case) for case, answer in tally.failed] == []
    assert len(tally.answers) == CASES


FUZZ_PROGRAM = """
import ctypes, os, time
from hypothesis import strategies as st
from tests.benchmarks.fuzz import __main__ as program, damage, place, runs

def run(self, case):
    {0}
    return place.Answer(code=0)

place.FuzzPlace.run, runs.HARD_LIMIT_S = run, 2.0
runs.KINDS["journals"] = st.builds(lambda n: damage.Case(words=[str(n)]), st.integers(0, 10**9))
program.main()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("body", "words", "least", "hangs", "failed"),
    [
        ("pass", ["--cases", "5"], 5, 0, 0),
        ("time.sleep(0.5)", ["--minutes", "0.02"], 1, 0, 0),
        ("os._exit(1)", [], 1, 0, 1),
        pytest.param("ctypes.PyDLL(None).sleep(3600)", [], 1, 1, 1, marks=pytest.mark.thorough),  # lets no signal handler run
        pytest.param("os.kill(os.getppid(), 15)", [], 0, 0, 0, id="SIGTERM"),
    ],
)
def test_fuzz_program_prints_its_table_for_every_kind_of_end(body, words, least, hangs, failed):
    command = [sys.executable, "-c", FUZZ_PROGRAM.format(body), "--kind", "journals", *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    row = [cell.strip() for cell in ended.stdout.splitlines()[-1].split("|")]
    assert row[1] == "journals"
    assert int(row[2]) >= least
    assert [int(cell) for cell in (row[7], row[9])] == [hangs, failed]
    assert ended.returncode == (1 if failed else 0)


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
def test_forbidden_behaviour_is_detected(place, monkeypatch, broken, cause):
    monkeypatch.setattr("autotune.cli.show.print_studies", lambda *_, **__: broken())
    if cause.startswith("hang"):
        monkeypatch.setattr(places, "LIMIT_S", 0.5)
    found = place.run(Case(words=["list"])).cause
    assert found.startswith(cause)
    assert bool(found) == bool(cause)
