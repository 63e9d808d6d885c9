"""Objectives on the command line, in files and in records; objectives that this machine cannot measure are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.config.compose import Composed, compose
from autotune.config.recorded import recorded
from autotune.errors import BadInput
from autotune.records import StudyRecord

COMMAND = ["python", "-c", "pass"]
GPU = {"name": "Fake GPU", "uuid": "GPU-1", "memory_bytes": 8 * 2**30}
HOST = {"num_cores": 4, "num_cpus": 4, "memory_bytes": 16 * 2**30, "isa": [], "has_compiler": True}


def composed(*overrides: str, gpus: tuple[dict[str, object], ...] = (), **more: Any) -> Composed:
    return compose(overrides, command=COMMAND, facts={**HOST, "gpus": list(gpus)}, **more)


def test_several_objectives_are_restored_from_the_study_configuration(tmp_path: Path) -> None:
    made = composed("objective=[throughput,time_for_samples]", "study.samples=115e6", "constraints.max_step_p95_s=0.5")
    file = tmp_path / "config.yaml"
    file.write_text(made.yaml)
    study = StudyRecord(name="s", title="s", command=COMMAND, cwd=str(tmp_path))
    again = recorded(study, file).config
    assert again.objective == ["throughput", "time_for_samples"]
    assert again.study.samples == 115e6
    assert again.constraints.max_step_p95_s == 0.5


def test_a_file_may_name_the_objective(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "aim.yaml").write_text(
        "# @package _global_\nobjective: [cost_per_epoch, throughput]\nmachine: {price_per_hour: 3}\n"
    )
    made = composed("+mine=aim", config_dirs=[tmp_path])
    assert made.config.objective == ["cost_per_epoch", "throughput"]


def test_energy_objective_is_accepted_unless_the_gpu_is_known_to_lack_a_counter() -> None:
    assert composed("objective=energy_per_sample", gpus=({**GPU, "has_energy_counter": True},))
    assert composed("objective=energy_per_sample", gpus=(GPU,))


@pytest.mark.parametrize(
    ("asked", "fact", "said"),
    [
        ("objective=energy_per_sample", "has_energy_counter", "no GPU of this machine has one"),
        ("constraints.max_power_w=300", "has_power_reading", "no GPU of this machine has one"),
    ],
)
def test_gpu_without_the_required_sensor_is_refused(asked: str, fact: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        composed(asked, gpus=({**GPU, fact: False},))
