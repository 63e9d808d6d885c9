import threading

import pytest

from autotune.monitors.host import HostMonitor, HostTimes
from autotune.monitors.nvml import DeviceMonitor, NoDevice
from autotune.monitors.watch import MachineWatch


class Device(DeviceMonitor):
    """Records how it is used; numbers of a real device are in test_nvml."""

    def __init__(self):
        self.seen, self.num_restarts, self.sampled = [], 0, threading.Condition()

    def sample(self, *, is_steady):
        with self.sampled:
            self.seen.append(is_steady)
            self.sampled.notify_all()

    def await_samples(self, num):
        with self.sampled:
            assert self.sampled.wait_for(lambda: len(self.seen) >= num, timeout=20)

    def metrics(self):
        return {"gpu.power_w": 300.0}

    def restart(self):
        self.num_restarts += 1

    def memory_used_bytes(self):
        return 1

    def memory_used_frac(self):
        return 0.5

    def holders(self):
        return []

    def close(self):
        pass


@pytest.fixture
def host():
    return HostMonitor(lambda: HostTimes(cpu_s=1, steal_s=0, pressure_s={}, throttled_s=None), lambda: 0.0)


def test_the_window_s_edges_are_sampled_at_once(host):
    device = Device()
    watch = MachineWatch(device, host, period_s=3600)
    device.await_samples(1)
    watch.note("warmup")
    watch.note("steady")
    device.await_samples(2)
    watch.note("steady")
    watch.note("exit")
    device.await_samples(3)
    assert set(watch.stop()) == {"gpu.power_w", "device_used_frac", "host.load_per_core"}
    assert device.seen[:3] == [False, True, False]
    assert device.num_restarts == 1


def test_no_thread_is_left_and_stop_may_be_called_twice(host):
    before = threading.active_count()
    watch = MachineWatch(Device(), host, period_s=0.001)
    assert threading.active_count() == before + 1
    watch.stop()
    watch.stop()
    assert threading.active_count() == before


def test_without_a_device_only_the_host_is_watched(host):
    before = threading.active_count()
    watch = MachineWatch(NoDevice(), host)
    assert threading.active_count() == before
    watch.note("steady")
    assert set(watch.stop()) == {"host.load_per_core"}
