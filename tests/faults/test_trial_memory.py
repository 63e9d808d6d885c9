"""Memory that runs out, for real: under device.memory_limit, and in a small /dev/shm."""

import re

import pytest

from tests.faults.trial_studies import is_root, start

LIMIT = "1200MiB"


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """A study a part of whose batch sizes does not fit."""
    study = start(
        tmp_path_factory.mktemp("limited"),
        "memory.py",
        {"loader.batch_size": [2, 4, 2000, 4000]},  # what fits and differs is slower: there is nothing for the finals to do
        f"device.memory_limit={LIMIT}",
        "study.budget.minutes=null",
    )
    study.finish()
    return study


def test_what_does_not_fit_is_want_of_memory_and_names_the_limit(limited):
    by_size = {t["knobs"]["loader.batch_size"]: t for t in limited.summary()["trials"] if t["kind"] == "search"}
    for size in (2000, 4000):
        assert by_size[size]["outcome"] == "host_oom"
        assert "DefaultCPUAllocator" in by_size[size]["reason"]
        assert by_size[size]["reason"].endswith("(under device.memory_limit, 1.17 GiB a process)")


def test_what_fits_is_measured_and_the_study_reaches_its_verdict(limited):
    summary = limited.summary()
    assert summary["status"] == "complete"
    assert summary["speedup"]["verdict"] == "same"
    assert summary["counts"] == {"ok": 2, "host_oom": 2}
    assert limited.left_running() == []


def test_a_full_dev_shm_is_named_and_the_study_goes_on(tmp_path):
    if not is_root():
        pytest.skip("needs root: a /dev/shm of its own, in a mount namespace")
    mount = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16M tmpfs /dev/shm && exec "$@"', "sh")
    space = {"env.FAULT": ["fills shared memory", "healthy"]}
    study = start(tmp_path, "faulty.py", space, arguments=("--output=x",), within=mount)
    study.finish()
    trials = {trial["knobs"].get("env.FAULT"): trial for trial in study.summary()["trials"]}
    assert trials["fills shared memory"]["outcome"] == "host_oom"
    assert re.search(r"^shared memory \(/dev/shm\) ran out: ", trials["fills shared memory"]["reason"])
    assert trials["healthy"]["outcome"] == "ok"
    assert study.left_running() == []
