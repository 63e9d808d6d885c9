"""The rate that follows from D (rate of the step alone) and L (rate of the loader alone).

`waiting` is 1 if each worker that takes a core stalls the whole step, and 0 if no thread of the step waits.
"""

import numpy as np
import pytest

from autotune.plain_json import from_json
from autotune.search.rates.regime import CROWDED, Machine, combined, device_rate

GPU, TWO_CORES = Machine(num_cores=16), Machine(num_cores=2, is_cpu=True)


def rate(device, loader, workers, machine, threads=2.0, waiting=1.0):
    arrays = [np.array([float(value)]) for value in (device, loader)]
    processes = {"workers": np.array([workers]), "threads": np.array([threads])}
    return float(combined(*arrays, **processes, machine=machine, waiting=waiting)[0])


def test_without_workers_step_and_loader_take_turns():
    assert rate(60, 120, 0, GPU) == pytest.approx(40)
    assert rate(60, 120, 0, TWO_CORES) == pytest.approx(40)


def test_slower_of_step_and_loader_decides_if_each_has_its_own_cores():
    assert rate(60, 200, 4, GPU) == pytest.approx(60, rel=0.01)
    assert rate(200, 60, 4, GPU) == pytest.approx(60, rel=0.01)
    assert 0.85 * 60 < rate(60, 60, 4, GPU) < 60, "both wait a little if they are equally fast"


def test_on_shared_cores_step_and_loader_take_turns_and_lose_a_little():
    """Measured samples per second on two cores: step alone 57, one worker alone 130, both 42, without workers 40."""
    in_turn = 1 / (1 / 57 + 1 / 130)
    assert rate(57, 130, 0, TWO_CORES) == pytest.approx(in_turn)
    assert rate(57, 130, 1, TWO_CORES) == pytest.approx(CROWDED * in_turn)
    assert rate(57, 130, 2, TWO_CORES) == pytest.approx(CROWDED * in_turn), "another worker adds no core"


@pytest.mark.parametrize(
    ("workers", "machine", "threads", "rate_without_waiting"),
    [
        (1, TWO_CORES, 2.0, 1 / (1 / 57 + 1 / (2 * 130))),
        (1, Machine(num_cores=16, is_cpu=True), 16.0, 1 / (1 / 57 + 1 / (16 * 130))),
    ],
)
def test_if_no_thread_waits_only_core_seconds_count(workers, machine, threads, rate_without_waiting):
    assert rate(57, 130, workers, machine, threads, waiting=0.0) == pytest.approx(rate_without_waiting, rel=0.01)
    halfway = np.sqrt(rate_without_waiting * rate(57, 130, workers, machine, threads))
    assert rate(57, 130, workers, machine, threads, waiting=0.5) == pytest.approx(halfway, rel=0.01)


def test_without_workers_no_thread_waits():
    assert rate(57, 130, 0, TWO_CORES, waiting=0.0) == rate(57, 130, 0, TWO_CORES)


def test_worker_without_a_core_hardly_slows_a_step_on_a_gpu():
    assert rate(1000, 400, 16, GPU) == pytest.approx(400, rel=0.03)


def test_step_with_one_thread_leaves_the_second_core_to_the_worker():
    assert rate(30, 130, 1, TWO_CORES, threads=1.0) == pytest.approx(30, rel=0.02)


@pytest.mark.parametrize("waiting", [0.0, 1.0])
def test_device_rate_is_inferred_but_uncertain_if_the_loader_is_the_bottleneck(waiting):
    devices, loaders, workers = np.array([57.0, 300.0]), np.array([260.0, 40.0]), np.array([2.0, 2.0])
    threads = np.array([2.0, 2.0])
    how = {"workers": workers, "threads": threads, "machine": TWO_CORES, "waiting": waiting}
    rates = combined(devices, loaders, **how)
    found, factor = device_rate(rates, loaders, **how)
    assert found[0] == pytest.approx(57, rel=0.02)
    assert 1 <= factor[0] < 2
    assert factor[1] > 5


def test_machine_is_read_from_records_of_other_versions():
    assert from_json({**vars(TWO_CORES), "of a later version": 1}, Machine) == TWO_CORES
    assert from_json({}, Machine).num_cores is None
