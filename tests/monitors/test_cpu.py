"""Processor time of the study, of other (foreign) processes and of the kernel, read from the real /proc or a made-up one."""

import os
import subprocess
import sys
import time

import pytest

from autotune.monitors import cpu
from autotune.monitors.cpu import CpuLook, CpuMonitor, Process, WaitingWatch, describe, read_processes, tree
from tests.support.waiting import wait_until

KTHREADD = 0x00200000


def process(parent, own_s, waited_for_s=0.0, *, started_ticks=1, is_kernel=False, core=None):
    return Process(
        parent=parent, started_ticks=started_ticks, own_s=own_s, waited_for_s=waited_for_s, is_kernel=is_kernel, core=core
    )


def look(time_s, processes, *, busy_s, idle_s=0.0, steal_s=0.0, read_bytes=None, neighbours=()):
    return CpuLook(
        time_s=time_s, num_cores=2, busy_s=busy_s, idle_s=idle_s, steal_s=steal_s, processes=processes, read_bytes=read_bytes,
        neighbours=frozenset(neighbours),
    )  # fmt: skip


TUNER, SUPERVISOR, TRIAL, WORKER, HOG, KERNEL = 10, 11, 12, 13, 99, 2
OTHER, ENDS, BEGINS = 20, 21, 22  # another slot's supervisor and its trials


def test_processes_outside_the_study_are_foreign_and_the_largest_is_named():
    before = {TUNER: process(1, 5.0), SUPERVISOR: process(TUNER, 1.0), TRIAL: process(SUPERVISOR, 2.0), HOG: process(1, 7.0)}
    after = {TUNER: process(1, 5.1), SUPERVISOR: process(TUNER, 1.0), TRIAL: process(SUPERVISOR, 8.0), HOG: process(1, 10.0)}
    use = CpuMonitor(TUNER).use(look(0, before, busy_s=100.0), look(4, after, busy_s=109.3, idle_s=0.4, steal_s=0.2))
    assert use.own_cores == pytest.approx(6.1 / 4)
    assert use.foreign_cores == pytest.approx(3.2 / 4)
    assert use.culprits == ((HOG, 0.75),)
    assert (use.idle_cores, use.steal_cores) == (pytest.approx(0.1), pytest.approx(0.05))
    assert use.metrics()["host.foreign_cores"] == use.foreign_cores


def test_processor_time_of_an_ended_trial_is_counted_through_its_parent():
    before = {TUNER: process(1, 0.0), SUPERVISOR: process(TUNER, 0.0, 3.0), TRIAL: process(SUPERVISOR, 2.0, 1.0)}
    after = {TUNER: process(1, 0.0), SUPERVISOR: process(TUNER, 0.0, 3.0 + 2.0 + 1.0 + 4.0)}
    use = CpuMonitor(TUNER).use(look(0, before, busy_s=0.0), look(4, after, busy_s=4.0))
    assert use.own_cores == pytest.approx(1.0)
    assert use.foreign_cores == 0.0


def test_trials_on_other_slots_are_not_foreign():
    before = {TUNER: process(1, 0.0), OTHER: process(1, 0.0, 1.0), ENDS: process(OTHER, 2.0), HOG: process(1, 7.0)}
    after = {TUNER: process(1, 0.0), OTHER: process(1, 0.0, 4.0), BEGINS: process(OTHER, 2.0), HOG: process(1, 8.0)}
    first = look(0, before, busy_s=0.0, neighbours=[OTHER, ENDS])
    use = CpuMonitor(TUNER).use(first, look(4, after, busy_s=4.0, neighbours=[OTHER, BEGINS]))
    assert use.foreign_cores == pytest.approx(1.0 / 4)  # of the 4 s, the neighbours have used 1 s + 2 s
    assert [pid for pid, _ in use.culprits] == [HOG]


def test_kernel_threads_are_not_foreign():
    before = {TUNER: process(1, 0.0), KERNEL: process(0, 1.0, is_kernel=True)}
    after = {TUNER: process(1, 0.0), KERNEL: process(0, 3.0, is_kernel=True)}
    use = CpuMonitor(TUNER).use(look(0, before, busy_s=0.0), look(4, after, busy_s=2.0))
    assert use.foreign_cores == 0.0
    assert use.kernel_cores == 0.5
    assert use.culprits == ()


def test_reused_process_id_counts_as_another_process():
    before = {TUNER: process(1, 0.0), HOG: process(1, 50.0, started_ticks=1)}
    after = {TUNER: process(1, 0.0), HOG: process(1, 2.0, started_ticks=9)}
    use = CpuMonitor(TUNER).use(look(0, before, busy_s=0.0), look(4, after, busy_s=2.0))
    assert use.culprits == ((HOG, 0.5),)


def test_figures_that_the_machine_does_not_report_are_unknown(tmp_path):
    monitor = CpuMonitor(proc=tmp_path, cgroups=tmp_path)
    use = monitor.use(monitor.look(0.0), monitor.look(4.0))
    assert use.foreign_cores is use.idle_cores is use.steal_cores is use.kernel_cores is use.read_bytes is None
    assert set(use.metrics()) == {"host.own_cores"}
    assert monitor.use(monitor.look(1.0), monitor.look(1.0)) is None


def machine(tmp_path, stat, **files):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    for path, text in {"proc/stat": stat, "proc/self/cgroup": "0::/\n", **files}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    cgroups.mkdir(exist_ok=True)
    return CpuMonitor(proc=proc, cgroups=cgroups)


def stat_of(*cores):
    return "cpu  9 9 9 9 9 9 9 9\n" + "".join(f"cpu{n} {' '.join(map(str, ticks))}\n" for n, ticks in enumerate(cores))


def test_only_cores_within_the_affinity_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: {1})
    cores = [(900, 0, 0, 0, 0, 0, 0, 0, 0, 0), (100, 20, 30, 400, 50, 7, 7, 5, 60, 0)]
    found = machine(tmp_path, stat_of(*cores)).look(0.0)
    assert found.num_cores == 1
    assert found.busy_s * cpu.TICKS_PER_S == pytest.approx(150)  # user time includes guests; interrupts do not count
    assert found.idle_s * cpu.TICKS_PER_S == pytest.approx(450)
    assert found.steal_s * cpu.TICKS_PER_S == pytest.approx(5)


def test_busy_time_is_unknown_if_proc_does_not_show_our_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: {0, 7})
    assert machine(tmp_path, stat_of((1,) * 8)).look(0.0).busy_s is None


@pytest.mark.parametrize(
    ("files", "busy_s"),
    [
        ({"cgroups/cpu.max": "150000 100000\n", "cgroups/cpu.stat": "usage_usec 2500000\n"}, 2.5),
        (
            {"proc/self/cgroup": "3:cpu,cpuacct:/\n", "cgroups/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
             "cgroups/cpu,cpuacct/cpu.cfs_period_us": "100000\n", "cgroups/cpu,cpuacct/cpuacct.usage": "3500000000\n"}, 3.5,
        ),
        (
            {"proc/self/cgroup": "3:cpu:/\n", "cgroups/cpu/cpu.cfs_quota_us": "150000\n",
             "cgroups/cpu/cpu.cfs_period_us": "100000\n", "cgroups/cpuacct/cpuacct.usage": "4500000000\n"}, 4.5,
        ),
    ],
)  # fmt: skip
def test_under_a_quota_the_busy_time_is_that_of_the_cgroup(tmp_path, monkeypatch, files, busy_s):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: set(range(4)))
    found = machine(tmp_path, stat_of(*[(900,) * 8] * 4), **files).look(0.0)
    assert found.num_cores == 1.5
    assert found.busy_s == busy_s
    assert found.idle_s is None


def test_quota_above_the_number_of_our_cores_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: {0})
    files = {"cgroups/cpu.max": "400000 100000\n", "cgroups/cpu.stat": "usage_usec 2500000\n"}
    assert machine(tmp_path, stat_of((100, 0, 0, 0, 0, 0, 0, 0)), **files).look(0.0).num_cores == 1


def test_process_names_with_special_characters_are_parsed(tmp_path):
    folder = tmp_path / "7"
    folder.mkdir()
    rest = ["S", "3", *["0"] * 4, str(KTHREADD), *["0"] * 4, "100", "50", "20", "10", *["0"] * 4, "77"]
    (folder / "stat").write_text(f"7 (a) S 1 (b) {' '.join(rest)}")
    (found,) = read_processes(tmp_path).values()
    assert (found.parent, found.started_ticks, found.is_kernel) == (3, 77, True)
    assert found.own_s == pytest.approx(150 / cpu.TICKS_PER_S)
    assert found.waited_for_s == pytest.approx(30 / cpu.TICKS_PER_S)


def test_foreign_process_is_found_on_this_machine():
    hog = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        monitor = CpuMonitor(root=2**22 + 1)  # no such process, so all processes are foreign
        waiting = WaitingWatch()
        before = monitor.look(time.monotonic())
        waiting.look(time.monotonic(), [hog.pid])
        used_s = before.processes[hog.pid].own_s
        wait_until(lambda: read_processes()[hog.pid].own_s > used_s + 0.3, "processor time of the process")
        waiting.look(time.monotonic(), [hog.pid])
        after = monitor.look(time.monotonic())
        use = monitor.use(before, after)
    finally:
        hog.kill()
        hog.wait()
    hog_cores = (after.processes[hog.pid].own_s - used_s) / use.seconds
    as_busy = [cores for pid, cores in use.culprits if pid != hog.pid and cores >= hog_cores]
    assert hog.pid in dict(use.culprits) or len(as_busy) == 3  # the three largest are named
    assert use.foreign_cores * use.seconds > 0.1
    waited = waiting.waiting_cores(use.seconds)
    assert waited is None or 0 <= waited < 1.5  # it has one thread


def test_tree_contains_a_process_and_all_its_descendants():
    processes = {1: process(0, 0), 10: process(1, 0), 11: process(10, 0), 12: process(11, 0), 99: process(1, 0)}
    assert tree(processes, 10) == {10, 11, 12}
    assert os.getpid() in tree(read_processes(), os.getppid())


def test_foreign_process_is_named_without_arguments_and_a_study_by_its_folder():
    plain = subprocess.Popen([sys.executable, __file__, "--password=hunter2"], stdin=subprocess.PIPE)
    environment = {**os.environ, "AUTOTUNE_MARK": "/data/runs/other:7"}
    waiting = [sys.executable, "-c", "print('started', flush=True); input()"]
    study = subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    try:
        assert study.stdout.readline()  # until then, the kernel may not show the process's environment
        said = describe(plain.pid)
        assert "hunter2" not in said
        assert "test_cpu.py" in said
        assert f"pid {plain.pid}" in said
        assert describe(study.pid) == f"another autotune study, /data/runs/other, pid {study.pid}"
    finally:
        for running in (plain, study):
            running.communicate()
    assert describe(plain.pid) == f"pid {plain.pid}, which has ended"


def test_waiting_is_counted_per_thread_while_the_thread_lives(tmp_path):
    def write(thread, waited_ns):
        folder = tmp_path / "5" / "task" / str(thread)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"1000 {waited_ns} 3\n")

    watch = WaitingWatch(tmp_path)
    assert watch.waiting_cores(4.0) is None
    write(5, 0)
    write(6, 10**9)
    watch.look(0.0, [5, 404])
    write(5, 10**9)
    write(6, 2 * 10**9)
    write(7, 9 * 10**9)  # new: its earlier waiting does not count
    watch.look(4.0, [5])
    assert watch.waiting_cores(4.0) == pytest.approx(0.5)
    assert watch.waiting_cores(10.0) is None  # most of this span is unknown


def test_waiting_is_unknown_if_a_process_has_ended(tmp_path):
    stat = tmp_path / "5" / "task" / "5" / "schedstat"
    stat.parent.mkdir(parents=True)
    stat.write_text("1000 0 3\n")
    watch = WaitingWatch(tmp_path)
    watch.look(0.0, [5])
    stat.unlink()
    watch.look(2.0, [5])
    assert watch.waiting_cores(2.0) is None


def test_trial_contains_processes_below_the_supervisor_but_no_helpers():
    processes = {10: process(1, 0), 11: process(10, 0), 12: process(11, 0), 13: process(12, 0), 14: process(10, 0)}
    assert CpuMonitor(root=10).trial(look(0.0, processes, busy_s=0.0)) == {12, 13}


def times(*, busy_s, idle_s=0.0):
    """Returns each core's (busy, idle, stolen) seconds."""
    return {core: (busy, idle_s, 0.0) for core, busy in enumerate(busy_s)}


def on_core(monitor, after, *, busy_s, cores, seconds=4.0):
    """Returns how `cores` were used in `seconds`, in which the processes used the times in `after` and none started."""
    before = {pid: process(one.parent, 0.0, is_kernel=one.is_kernel, core=one.core) for pid, one in after.items()}
    first, last = (
        CpuLook(time_s=s, num_cores=2, busy_s=0.0, idle_s=0.0, steal_s=0.0, processes=found, by_core=times(busy_s=busy))
        for s, found, busy in ((0.0, before, [0.0] * len(busy_s)), (seconds, after, busy_s))
    )
    return monitor.use(first, last, frozenset(cores))


def test_load_on_cores_that_the_trial_may_not_use_is_not_foreign():
    after = {TUNER: process(1, 0.0), SUPERVISOR: process(TUNER, 0.0), TRIAL: process(SUPERVISOR, 3.9), HOG: process(1, 4.0)}
    found = {cores: on_core(CpuMonitor(TUNER), after, busy_s=[3.9, 4.0], cores=cores) for cores in ((0,), (0, 1))}
    assert found[0,].foreign_cores == pytest.approx(0.0)
    assert (found[0,].num_cores, found[0,].is_part) == (1, True)
    assert found[0, 1].foreign_cores == pytest.approx(1.0)
    assert (found[0, 1].num_cores, found[0, 1].is_part) == (2, False)


def test_kernel_threads_on_other_cores_do_not_hide_a_foreign_process():
    after = {TUNER: process(1, 0.0), KERNEL: process(0, 2.0, is_kernel=True, core=1), HOG: process(1, 2.0, core=0)}
    use = on_core(CpuMonitor(TUNER), after, busy_s=[2.0, 2.0], cores=(0,))
    assert use.foreign_cores == pytest.approx(0.5)
    assert use.kernel_cores == 0.0


def test_kernel_thread_that_moves_to_our_core_does_not_bring_its_earlier_time():
    first = {TUNER: process(1, 0.0), KERNEL: process(0, 900.0, is_kernel=True, core=1)}
    last = {TUNER: process(1, 0.0), KERNEL: process(0, 900.4, is_kernel=True, core=0)}
    looks = (
        CpuLook(time_s=s, num_cores=2, busy_s=0.0, idle_s=0.0, steal_s=0.0, processes=found, by_core=times(busy_s=[busy, 0.0]))
        for s, found, busy in ((0.0, first, 0.0), (4.0, last, 2.4))
    )
    use = CpuMonitor(TUNER).use(*looks, frozenset({0}))
    assert use.kernel_cores == pytest.approx(0.1)
    assert use.foreign_cores == pytest.approx(0.5)


def test_processor_time_of_autotune_is_counted_separately_and_by_core():
    tracker = 20
    after = {
        TUNER: process(1, 0.4, core=0), tracker: process(TUNER, 0.8, core=0),
        SUPERVISOR: process(TUNER, 0.0, 1.0, core=0), TRIAL: process(SUPERVISOR, 2.0, core=0),
    }  # fmt: skip
    here = on_core(CpuMonitor(TUNER), after, busy_s=[4.2, 0.0], cores=(0,))
    assert here.tuner_cores == pytest.approx(0.3)
    assert here.metrics()["host.tuner_cores"] == here.tuner_cores
    assert here.foreign_cores == pytest.approx(0.0)
    after = {pid: process(one.parent, one.own_s, one.waited_for_s, core=0 if pid == TRIAL else 1) for pid, one in after.items()}
    away = on_core(CpuMonitor(TUNER), after, busy_s=[4.0, 1.2], cores=(0,))
    assert away.tuner_cores == 0.0
    assert away.foreign_cores == pytest.approx(0.25), "the tuner's work on other cores must not hide foreign load"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_foreign_process_bound_to_other_cores_is_not_named():
    here, there, *_ = sorted(os.sched_getaffinity(0))
    hog = subprocess.Popen(["taskset", "-c", str(there), sys.executable, "-S", "-c", "while True: pass"])
    try:
        wait_until(lambda: cpu.cores_of([hog.pid]) == {there})
        monitor = CpuMonitor(root=2**22 + 1)
        before = monitor.look(time.monotonic())
        wait_until(lambda: monitor.look(time.monotonic()).processes[hog.pid].own_s >= before.processes[hog.pid].own_s + 0.2)
        after = monitor.look(time.monotonic())
        used = {
            core: cpu._culprits(before.processes, after.processes, frozenset(), 1.0, frozenset({core}))
            for core in (here, there)
        }
    finally:
        hog.kill()
        hog.wait()
    assert hog.pid not in dict(used[here])
    assert after.processes[hog.pid].core == there


def test_the_cores_of_a_process_are_those_that_its_threads_may_use():
    assert cpu.cores_of([os.getpid()]) == os.sched_getaffinity(0)
    assert cpu.cores_of([2**22 + 1]) == frozenset()
