"""Checks of memory limits, of the number of processes and GPUs, and of pinned knobs."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.checks import memory_limit_bytes, problems_of
from autotune.config.compose import compose
from autotune.config.schema import DeviceOptions, LaunchOptions, StudyConfig
from autotune.errors import BadInput
from tests.config.conftest import FACTS


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, None),
        ("8GiB", 8 * 2**30),
        ("8 gb", 8 * 10**9),
        ("8g", 8 * 10**9),
        ("512Mi", 2**29),
        (".5", 2**33),
        (0.5, 2**33),
        ("0.25", 2**32),
        (2**31, 2**31),
        ("1.5e9", 1_500_000_000),
        (1, 2**34),
    ],
)
def test_memory_limit_may_be_a_number_of_bytes_a_text_or_a_fraction(limit: Any, expected: int | None) -> None:
    assert memory_limit_bytes(limit, 2**34) == expected


def test_fraction_of_an_unknown_capacity_sets_no_limit() -> None:
    assert memory_limit_bytes(0.5, None) is None


@pytest.mark.parametrize("limit", ["lots", "8XB", -1, 0, "1e999", 1.5, "1 kb", ""])
def test_invalid_memory_limits_are_refused(limit: Any) -> None:
    with pytest.raises(BadInput, match=r"device\.memory_limit"):
        memory_limit_bytes(limit, 2**34)


@pytest.mark.parametrize(
    ("nproc", "device", "problem"),
    [
        (2, DeviceOptions(), None),
        (8, DeviceOptions(kind="cpu"), None),
        (3, DeviceOptions(), "launch.nproc: more processes than GPUs, got 3. Allowed: 1 to 2"),
        (2, DeviceOptions(kind="cuda", index=1), "launch.nproc: more processes than GPUs from device.index=1 on, got 2."),
    ],
)
def test_every_process_needs_a_separate_gpu(
    nproc: int, device: DeviceOptions, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = problems_of(StudyConfig(launch=LaunchOptions(nproc=nproc), device=device), [{"name": "g"}, {"name": "g"}])
    said = [each for each in found if each.startswith("launch.nproc")]
    assert (said[0].startswith(problem) if said else None) is (True if problem else None)


@pytest.mark.parametrize(
    ("visible", "problem"),
    [
        ("0,7,1", "device.index: no such GPU, got 1. Allowed: 0 to 0."),
        ("7", "device.kind: CUDA_VISIBLE_DEVICES hides every GPU, got device.index=1."),
        ("1,0", ""),
    ],
)
def test_gpu_behind_a_number_that_no_gpu_has_cannot_be_chosen(
    visible: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = problems_of(StudyConfig(device=DeviceOptions(index=1)), [{"name": "g"}, {"name": "g"}])
    assert "".join(each for each in found if each.startswith("device."))[: len(problem) or None] == problem


def test_pins_without_effect_on_this_machine_are_noted(make) -> None:
    said = make(
        "memory.fraction=0.9", "device.memory_limit=0.5", "precision.amp=fp16", "nccl.proto=LL", "loader.pin_memory=false"
    ).notes
    assert {note.partition(":")[0] for note in said} == {"memory.fraction=0.9", "nccl.proto=LL", "precision.amp=fp16"}
    assert "memory.fraction=0.9: device.memory_limit=0.5 is lower and takes precedence" in said
    assert make("loader.num_workers=2").notes == []
    (note,) = make("launch.nproc=2", "parallel.strategy=fsdp", "layout.channels_last=true").notes
    assert note == "layout.channels_last=true: has no effect with parallel.strategy=fsdp"


@pytest.mark.parametrize("words", [["device.kind=cpu"], []])
def test_rules_ignore_a_gpu_that_the_program_will_not_use(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if words else "")
    facts = {**FACTS, "gpus": [{"name": "Fake"}]}
    (note,) = compose(["model=resnet18", "nccl.proto=LL", *words], command=None, facts=facts).notes
    assert note.startswith("nccl.proto=LL: ")


@pytest.mark.parametrize("device", [DeviceOptions(kind="cuda"), DeviceOptions(index=1)])
def test_gpu_is_refused_if_every_gpu_is_hidden(device: DeviceOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (said,) = problems_of(StudyConfig(device=device), [{"name": "g"}, {"name": "g"}])
    assert "CUDA_VISIBLE_DEVICES hides every GPU" in said


def test_an_allocator_that_is_not_installed_is_refused(refused, monkeypatch) -> None:
    monkeypatch.setattr("autotune.knobs.malloc.installed", dict)
    assert refused("memory.malloc=jemalloc")[0].startswith("memory.malloc: not installed here, got 'jemalloc'.")
