"""Processor time of trials on other slots counts neither as foreign nor as the watched trial's."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from autotune.harness.protocol import MARK_VARIABLE
from autotune.monitors.cpu import CpuMonitor, identity
from tests.support.waiting import wait_until

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
    assert use.own_cores < 1.5
    assert other not in [pid for pid, _ in use.culprits]
    assert {mine, other} <= CpuMonitor().own(CpuMonitor().look(time.monotonic()))


def test_processes_with_the_mark_of_the_study_and_their_children_are_neighbours():
    def start(mark):
        child = "import os, subprocess, sys; os.environ.clear(); subprocess.run([sys.executable, '-S', '-c', 'input()'])"
        argv, environment = [sys.executable, "-S", "-c", child], {**os.environ, MARK_VARIABLE: mark}
        return subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE)

    with start("/runs/s:2/7") as one, start("/runs/s2:2/7") as other, start("/runs/s:1/8") as own:
        found = [wait_until(psutil.Process(each.pid).children) for each in (one, other, own)]
        monitor = CpuMonitor(own.pid)
        assert monitor.look(0.0).neighbours == frozenset()
        monitor.study = "/runs/s:"
        assert monitor.look(0.0).neighbours == {one.pid, found[0][0].pid}


def test_a_tuner_on_the_same_machine_is_a_neighbour_with_its_children_but_the_agent_is_not():
    waits = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as agent, subprocess.Popen(waits, stdin=subprocess.PIPE) as tracker:
        pid, started_ticks = identity()
        found = CpuMonitor(agent.pid, tuner=(pid, started_ticks)).look(0.0).neighbours
        assert found >= {os.getpid(), tracker.pid}
        assert agent.pid not in found
        assert CpuMonitor(agent.pid, tuner=(pid, started_ticks + 1)).look(0.0).neighbours == frozenset()  # on another machine
