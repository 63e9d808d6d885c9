"""Effective cores under affinity and cgroup quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.harness.cores import cpu_quota, num_cores
from autotune.machine.facts import memory_left_bytes, memory_limit_bytes


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "proc-self-cgroup"


def test_quota_of_cgroup_v2_is_the_smallest_up_the_tree(tmp_path: Path, own: Path) -> None:
    own.write_text("0::/user/job\n")
    write(tmp_path / "user/cpu.max", "150000 100000\n")
    write(tmp_path / "user/job/cpu.max", "max 100000\n")
    write(tmp_path / "user/job/memory.max", "1073741824\n")
    assert cpu_quota(tmp_path, own) == 1.5
    assert memory_limit_bytes(tmp_path, own) == 2**30


def test_quota_of_cgroup_v1_is_read_and_its_default_memory_limit_counts_as_none(tmp_path: Path, own: Path) -> None:
    own.write_text("4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n")
    write(tmp_path / "cpu/docker/x/cpu.cfs_quota_us", "250000\n")
    write(tmp_path / "cpu/docker/x/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "memory/docker/x/memory.limit_in_bytes", "9223372036854771712\n")
    assert cpu_quota(tmp_path, own) == 2.5
    assert memory_limit_bytes(tmp_path, own) is None


def test_a_container_sees_its_quota_at_the_root(tmp_path: Path, own: Path) -> None:
    own.write_text("0::/\n")
    write(tmp_path / "cpu.max", "50000 100000\n")
    assert cpu_quota(tmp_path, own) == 0.5


@pytest.mark.parametrize("text", ["", "max 100000", "-1", "nonsense here", "100 0"])
def test_missing_or_invalid_quota_is_none(tmp_path: Path, own: Path, text: str) -> None:
    own.write_text("0::/../../escape\n")
    write(tmp_path / "cpu.max", text)
    assert cpu_quota(tmp_path, own) is None


def test_number_of_cores_is_at_least_one_and_at_most_the_affinity(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "1000 100000")
    assert num_cores(tmp_path) == 1
    assert num_cores(tmp_path / "nothing") <= len(os.sched_getaffinity(0))


def test_memory_left_by_a_cgroup_counts_what_its_processes_use_without_idle_files(tmp_path: Path, own: Path) -> None:
    own.write_text("0::/pod/a\n")
    write(tmp_path / "pod/memory.max", "1000\n")
    write(tmp_path / "pod/memory.current", "900\n")
    write(tmp_path / "pod/memory.stat", "anon 500\ninactive_file 300\nactive_file 100\n")
    write(tmp_path / "pod/a/memory.max", "800\n")
    write(tmp_path / "pod/a/memory.current", "100\n")
    assert memory_left_bytes(tmp_path, own) == 400
    assert memory_limit_bytes(tmp_path, own) == 800
    own.write_text("3:memory:/x\n")
    write(tmp_path / "memory/x/memory.limit_in_bytes", "1000\n")
    write(tmp_path / "memory/x/memory.usage_in_bytes", "1200\n")
    write(tmp_path / "memory/x/memory.stat", "inactive_file 1\ntotal_inactive_file 150\n")
    assert memory_left_bytes(tmp_path, own) == 0
    assert memory_left_bytes(tmp_path / "nothing", own) is None
