import pytest

from autotune.config.schema import DeviceOptions, MeasureOptions
from autotune.errors import BadInput
from autotune.study.settings import deadlines, device_environment, memory_limit_bytes

HOST = {"memory_bytes": 1000, "gpus": []}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, None), (0.5, 500), (1.0, 1000), (4096, 4096), ("8GiB", 8 * 2**30), ("2 gb", 2 * 10**9), ("512M", 512 * 10**6)],
)
def test_memory_limit_is_bytes_text_or_a_fraction(limit, expected):
    assert memory_limit_bytes(limit, HOST) == expected


def test_fraction_is_of_the_gpu_where_there_is_one():
    assert memory_limit_bytes(0.5, {"memory_bytes": 1000, "gpus": [{"memory_bytes": 80}]}) == 40


@pytest.mark.parametrize("limit", ["lots", "-1", "0", "8XB"])
def test_what_is_no_amount_of_memory_is_refused(limit):
    with pytest.raises(BadInput, match=r"device\.memory_limit: not an amount of memory, got .*8GiB"):
        memory_limit_bytes(limit, HOST)


def test_program_sees_the_device_it_is_to_use():
    assert device_environment(DeviceOptions(kind="cpu")) == {"CUDA_VISIBLE_DEVICES": ""}
    assert device_environment(DeviceOptions(kind="cuda", index=2)) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert device_environment(DeviceOptions()) == {}


def test_phase_limits_come_from_the_configuration():
    found = deadlines(MeasureOptions(start_s=1, compile_s=2, step_s=3), max_s=4.0)
    assert (found.start_s, found.compile_s, found.step_s, found.total_s) == (1, 2, 3, 4.0)
    assert deadlines(MeasureOptions(), max_s=None).total_s >= 3600
