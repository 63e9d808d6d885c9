"""launch.slots: bad input is refused before anything is measured; auto is one slot per GPU for a program that uses one GPU."""

import pytest

from autotune.config.command import CommandTemplate
from autotune.config.compose import compose
from autotune.config.schema import DeviceOptions, LaunchOptions, StudyConfig
from autotune.config.slots import gpus_of, has_unknown, num_slots
from autotune.errors import BadInput
from autotune.launchers import make_launcher
from tests.study.conftest import MACHINE

A100 = {"name": "A100", "memory_bytes": 80 * 2**30}
GPUS = [{**A100, "uuid": f"GPU-{n}"} for n in range(4)]
UNLIKE = [*GPUS[:2], {"name": "T4", "memory_bytes": 16 * 2**30, "uuid": "GPU-9"}]
COMMAND = CommandTemplate(parts=["python", "train.py"])


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def refusal(*overrides, gpus=(), num_cores=8, command=("python", "-c", "pass")):
    facts = {**MACHINE, "gpus": list(gpus), "num_cores": num_cores}
    with pytest.raises(BadInput) as caught:
        compose(list(overrides), command=command and list(command), facts=facts)
    return "\n".join(caught.value.problems)


def slots(config=None, command=COMMAND, gpus=(), num_cores=8):
    return num_slots(config or StudyConfig(), command, {**MACHINE, "gpus": list(gpus), "num_cores": num_cores})


@pytest.mark.parametrize("value", ["0", "-1", "many", "''", "2.5", "[1,2]", "null"])
def test_invalid_number_of_slots_is_refused(value):
    assert refusal(f"launch.slots={value}").startswith("launch.slots: ")


def test_more_slots_than_gpus_or_cores_are_refused():
    said = "launch.slots: more slots than GPUs, got 5. Allowed: auto, or 1 to 4, with one GPU each. Give fewer."
    assert refusal("launch.slots=5", gpus=GPUS) == said
    assert "more slots than CPU cores, got 3. Allowed: auto, or 1 to 2." in refusal("launch.slots=3", num_cores=2)
    assert "more slots than CPU cores, got 4" in refusal("launch.slots=4", gpus=GPUS, num_cores=2)
    assert "got 4. Allowed: auto, or 1 to 3" in refusal("launch.slots=4", "device.index=1", gpus=GPUS)
    assert "got 3. Allowed: auto, or 1 to 2, with 2 GPUs" in refusal(
        "launch.slots=3", "launch.nproc=2", gpus=GPUS, command=None
    )


def test_gpus_that_are_hidden_do_not_count(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1")
    assert "got 3. Allowed: auto, or 1 to 2" in refusal("launch.slots=3", gpus=GPUS)
    facts = {"gpus": GPUS, "num_cores": 8}
    assert [gpu["uuid"] for gpu in gpus_of(StudyConfig(), facts)] == ["GPU-3", "GPU-1"]


def test_slots_on_pinned_or_different_gpus_are_refused():
    said = refusal("launch.slots=2", "+env.CUDA_VISIBLE_DEVICES='0'", gpus=GPUS)
    assert "launch.slots: got 2, but env.CUDA_VISIBLE_DEVICES pins all trials to the same GPUs" in said
    on_slurm = refusal("launcher=slurm", "launch.slots=2", "+env.CUDA_VISIBLE_DEVICES='0'")
    assert "launch.slots: got 2, but env.CUDA_VISIBLE_DEVICES pins all trials to the same GPUs" in on_slurm
    assert "got 3 on A100 and T4, but rates of unlike GPUs cannot be compared" in refusal("launch.slots=3", gpus=UNLIKE)


def test_slots_on_indistinguishable_gpus_are_refused(monkeypatch):
    assert "got 2, but NVML does not tell apart the GPUs" in refusal("launch.slots=2", gpus=[{**A100, "uuid": None}] * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert "got 2, but NVML does not tell apart the GPUs" in refusal("launch.slots=2", gpus=GPUS)
    assert not has_unknown(StudyConfig(device=DeviceOptions(kind="cpu")), {"gpus": GPUS})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,7")  # CUDA ignores a number without a GPU
    assert not has_unknown(StudyConfig(), {"gpus": GPUS})


def test_inside_an_allocation_each_slot_needs_a_share_of_the_cpus(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    said = refusal("launch.slots=2", "launcher=slurm")
    assert (
        "launch.slots: got 2, but the first slot would take all CPUs of job 12. Give each slot its share: launch.slurm.cpus=N."
        in said
    )


def test_inside_an_allocation_with_gpus_each_slot_needs_a_share_of_the_gpus(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    slurm = ["launch.slots=2", "launcher=slurm", "launch.slurm.cpus=4"]
    said = refusal(*slurm, "launch.slurm.mem=' '")  # a second problem, so that compose refuses in every case
    assert "launch.slots: got 2, but the first slot would take all GPUs of job 12. Give each slot its share: " in said
    for share in ("launch.slurm.gres=gpu:1", "launch.slurm.gres=none", "launch.slurm.args='--gpus=1'"):
        assert "would take all GPUs" not in refusal(*slurm, share, "launch.slurm.mem=' '")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")  # srun reads it
    assert "would take all GPUs" not in refusal(*slurm, "launch.slurm.mem=' '")
    monkeypatch.delenv("SLURM_GPUS_PER_TASK")
    monkeypatch.setenv("SLURM_JOB_GPUS", "")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert "would take all GPUs" not in refusal(*slurm, "launch.slurm.mem=' '")
    monkeypatch.delenv("SLURM_JOB_GPUS")
    assert "would take all GPUs" not in refusal(*slurm, "launch.slurm.mem=' '")


def test_auto_gives_one_slot_per_gpu_to_a_program_that_uses_one_gpu():
    assert slots(gpus=GPUS) == 4
    assert slots(gpus=GPUS, num_cores=3) == 3
    assert slots(gpus=GPUS[:1]) == 1


@pytest.mark.parametrize(
    "how",
    [
        {"gpus": ()},
        {"gpus": UNLIKE},
        {"gpus": GPUS, "config": StudyConfig(device=DeviceOptions(kind="cpu"))},
        {"gpus": GPUS, "config": StudyConfig(launch=LaunchOptions(nproc=2))},
        {"gpus": GPUS, "config": StudyConfig(launch=LaunchOptions(slots=1))},
        {"gpus": GPUS, "config": StudyConfig(env={"CUDA_VISIBLE_DEVICES": "0"})},
        {"gpus": GPUS, "command": CommandTemplate(parts=["torchrun", "--nproc_per_node=2", "train.py"])},
        {"gpus": [{**A100, "uuid": None}, {**A100, "uuid": None}]},
    ],
)
def test_all_other_cases_have_one_slot(how):
    assert slots(**how) == 1


def test_machine_with_one_slot_gets_a_launcher_without_slots():
    made = make_launcher(StudyConfig(), COMMAND, MACHINE)
    try:
        assert made.beside() == []
    finally:
        made.close()


def test_launcher_of_a_machine_with_gpus_has_one_slot_per_gpu():
    made = make_launcher(StudyConfig(), COMMAND, {**MACHINE, "gpus": GPUS[:2], "num_cores": 2})
    try:
        assert [part.slot.gpus for part in made.beside()] == [("GPU-0",), ("GPU-1",)]
    finally:
        made.close()
