"""The harness stays first on PYTHONPATH. If a program does not load the harness, the reason is found."""

import os
import subprocess
import sys

import psutil
import pytest

from autotune.launchers import injection
from autotune.launchers.injection import INJECT, why_shut_out, with_harness
from tests.support.waiting import wait_until

SLEEP = "import time; time.sleep(60)"


def test_pythonpath_in_the_command_keeps_the_harness_first():
    words = ["env", "PYTHONPATH=src:lib", "python", "train.py", "--note", "my PYTHONPATH=x"]
    assert with_harness(words) == ["env", f"PYTHONPATH={INJECT}:src:lib", *words[2:]]
    assert with_harness(["env", "PYTHONPATH=", "python"]) == ["env", f"PYTHONPATH={INJECT}", "python"]


@pytest.fixture
def start(monkeypatch):
    """Returns a function that starts a sleeping Python process."""
    monkeypatch.setattr(injection, "YOUNG_S", -60.0)
    started = []

    def start_python(*options, **environment):
        program = subprocess.Popen([sys.executable, *options, "-c", SLEEP], env=environment)
        started.append(program)
        process = psutil.Process(program.pid)
        wait_until(lambda: SLEEP in process.cmdline(), "`exec`", every_s=0.001)
        return process

    yield start_python
    for program in started:
        program.kill()
        program.wait()


def test_reason_why_the_harness_was_not_loaded_is_found(start):
    there = {"PYTHONPATH": f"{INJECT}{os.pathsep}src", "AUTOTUNE_SPEC": "spec.json"}
    assert why_shut_out([start(**there)]) == ""
    assert "-I" in why_shut_out([start("-I", **there)])
    assert "-sE" in why_shut_out([start("-u", "-sE", **there)])
    assert "PYTHONPATH was replaced" in why_shut_out([start(**{**there, "PYTHONPATH": "src"})])
    assert "environment was cleared" in why_shut_out([start(PATH="")])
    assert why_shut_out([]) == ""
