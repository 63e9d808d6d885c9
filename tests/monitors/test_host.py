import pytest

from autotune.monitors.host import HostMonitor, HostTimes, oom_kills, read_times


def test_fractions_are_differences_of_two_readings_over_the_time_between():
    times = iter(
        [
            HostTimes(cpu_s=100, steal_s=1, pressure_s={"cpu": 5}, throttled_s=2),
            HostTimes(cpu_s=120, steal_s=2, pressure_s={"cpu": 6, "io": 3}, throttled_s=4),
        ]
    )
    clock = iter([0.0, 10.0])
    metrics = HostMonitor(lambda: next(times), lambda: next(clock)).metrics()
    assert metrics.pop("host.load_per_core") >= 0
    assert metrics == {
        "host.steal_frac": pytest.approx(0.05),
        "host.pressure_cpu_frac": pytest.approx(0.1),
        "host.throttled_frac": pytest.approx(0.2),
    }


def test_metrics_that_the_machine_does_not_report_are_absent():
    times = HostTimes(cpu_s=1, steal_s=0, pressure_s={}, throttled_s=None)
    assert set(HostMonitor(lambda: times, lambda: 0.0).metrics()) == {"host.load_per_core"}


def test_this_host_can_be_read():
    times = read_times()
    assert times.cpu_s > 0
    assert HostMonitor(read_times, lambda: 0.0).metrics()


def machine(tmp_path, cgroup, files):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "proc", tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("cgroup", "files", "count"),
    [
        ("0::/user/a\n", {"user/a/memory.events": "low 0\noom 3\noom_kill 2\n"}, 2),
        ("0::/elsewhere\n", {"memory.events": "oom_kill 4\n"}, 4),  # a container sees its own cgroup as the root
        ("4:memory:/a\n0::/\n", {"memory/a/memory.oom_control": "under_oom 0\noom_kill 1\n"}, 1),
        ("4:cpu,memory:/a\n", {"memory/memory.oom_control": "oom_kill 5\n"}, 5),
        ("0::/a:b\n", {"a:b/memory.events": "oom_kill 6\n"}, 6),
        ("0::/a\n", {}, None),
        ("nonsense\n", {}, None),
    ],
)
def test_oom_kills_are_read_from_either_cgroup_version(tmp_path, cgroup, files, count):
    assert oom_kills(*machine(tmp_path, cgroup, files)) == count


@pytest.mark.parametrize(
    ("cgroup", "files", "throttled_s"),
    [
        ("0::/a\n", {"a/cpu.stat": "usage_usec 5\nthrottled_usec 2500000\n"}, 2.5),
        ("2:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.stat": "nr_periods 1\nthrottled_time 3000000000\n"}, 3.0),
        (
            "0::/a/b\n",
            {"a/cpu.max": "100000 100000\n", "a/cpu.stat": "throttled_usec 2500000\n", "a/b/cpu.stat": "throttled_usec 0\n"},
            2.5,  # a cgroup counts only the throttling by its own quota
        ),
        ("0::/a\n", {}, None),
    ],
)
def test_throttling_is_read_from_either_cgroup_version(tmp_path, cgroup, files, throttled_s):
    assert read_times(*machine(tmp_path, cgroup, files)).throttled_s == throttled_s


def test_pressure_is_read_where_the_kernel_has_it(tmp_path):
    proc, cgroups = machine(tmp_path, "0::/\n", {})
    (proc / "pressure").mkdir()
    (proc / "pressure" / "cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull total=3\n")
    (proc / "pressure" / "io").write_text("nonsense\n")
    assert read_times(proc, cgroups).pressure_s == {"cpu": 1.5}
