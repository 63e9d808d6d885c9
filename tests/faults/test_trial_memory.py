"""Memory really runs out: under device.memory_limit, and in a small /dev/shm."""

import pytest

from tests.faults.trial_studies import is_root, start

pytestmark = pytest.mark.thorough

LIMIT = "1200MiB"


SMALL = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16M tmpfs /dev/shm && exec "$@"', "sh")


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Returns two finished studies: in one, large batches do not fit; the other has a small /dev/shm (None without root)."""
    limited = start(
        tmp_path_factory.mktemp("limited"),
        "memory.py",
        {"loader.batch_size": [2, 4, 2000, 4000]},  # sizes that fit are slower than the baseline, so the finals are short
        f"device.memory_limit={LIMIT}",
        "study.budget.minutes=null",
    )
    shared = None
    if is_root():
        space = {"env.FAULT": ["fills shared memory", "healthy"]}
        shared = start(tmp_path_factory.mktemp("shared"), "faulty.py", space, arguments=("--output=x",), within=SMALL)
        shared.finish()
    limited.finish()
    return limited, shared


def test_batches_over_the_memory_limit_are_out_of_memory_and_name_the_limit(studies):
    by_size = {t["knobs"]["loader.batch_size"]: t for t in studies[0].summary()["trials"]}
    for size in (2000, 4000):
        assert by_size[size]["outcome"] == "host_oom"
        assert "DefaultCPUAllocator" in by_size[size]["reason"]
        assert by_size[size]["reason"].endswith("(under device.memory_limit, 1.17 GiB a process)")


def test_batches_within_the_memory_limit_are_measured_and_a_verdict_is_reached(studies):
    summary = studies[0].summary()
    assert summary["status"] == "complete"
    assert summary["speedup"]["verdict"] == "same"
    assert summary["counts"] == {"ok": 2, "host_oom": 2}
    assert studies[0].left_running() == []


def test_full_dev_shm_is_named_as_the_reason_and_the_study_continues(studies):
    study = studies[1]
    if study is None:
        pytest.skip("needs root: a /dev/shm of its own, in a mount namespace")
    trials = {trial["knobs"].get("env.FAULT"): trial for trial in study.summary()["trials"]}
    assert trials["fills shared memory"]["outcome"] == "host_oom"
    assert trials["fills shared memory"]["reason"].startswith("shared memory (/dev/shm) ran out: ")
    assert trials["healthy"]["outcome"] == "ok"
    assert study.left_running() == []
