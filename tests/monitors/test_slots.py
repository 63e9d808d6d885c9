"""Processor time of trials on other slots counts neither as foreign nor as the watched trial's."""

import os
import subprocess
import sys
import time

import pytest

from autotune.monitors.cpu import CpuMonitor

CORES = sorted(os.sched_getaffinity(0))
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print('on', flush=True)\nwhile True: pass"

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="this machine has a single core")


@pytest.fixture
def busy_on():
    started = []

    def start(core):
        process = subprocess.Popen([sys.executable, "-S", "-c", BUSY, str(core)], stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_monitor_of_a_slot_counts_only_processes_that_may_run_on_its_cores(busy_on):
    mine, other = busy_on(CORES[0]), busy_on(CORES[1])
    monitor = CpuMonitor(slot=[CORES[0]])
    before = monitor.look(time.monotonic())
    assert mine in monitor.own(before)
    assert os.getpid() in monitor.own(before)
    assert other not in monitor.own(before)
    time.sleep(0.5)
    use = monitor.use(before, monitor.look(time.monotonic()), frozenset(CORES[:1]))
    assert use.own_cores < 1.1
    assert other not in [pid for pid, _ in use.culprits]
    assert {mine, other} <= CpuMonitor().own(CpuMonitor().look(time.monotonic()))
