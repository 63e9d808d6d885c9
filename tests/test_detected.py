"""How detected facts are described to the user."""

import pytest

from autotune.detected import NO_LOADER, doubts, findings, missing_processes, near
from autotune.harness.protocol import APPLIED, OVERRIDDEN, KnobReport, RankResult

LOADER = {
    "site": "/elsewhere/lib/loading.py:7",
    "ordinal": 0,
    "dataset": "data.Pictures",
    "num_samples": 1200,
    "loader.batch_size": 16,
    "loader.num_workers": 2,
    "loader.prefetch_factor": 4,
    "loader.pin_memory": True,
    "loader.persistent_workers": False,
}
DETECTED = {
    "num_steps": 4,
    "loader": LOADER,
    "num_loaders": 2,
    "batches_per_step": 4.2,
    "modules": ["DistributedDataParallel(Net)", "Head"],
    "num_parameters": [1_500_000, 900],
    "wrappers": ["DistributedDataParallel"],
    "optimizers": ["Adam", "SGD", "Adam"],
    "precision": {"autocast": "bf16", "parameters": ["fp32"]},
    "grad_scaler": True,
    "compile": "default",
}


def a_result(**fields) -> RankResult:
    return RankResult(**{"trial": 0, "nonce": "n", "rank": 0, "world_size": 2, "pid": 1, "status": "measured", **fields})


def test_findings_describe_every_detected_fact():
    facts = {"torch": "2.9", "python": "3.11.7", "executable": "/venv/bin/python", "device": "cuda", "device_name": "H200"}
    steps = {"end_s": [0.0, 0.5, 1.0, 1.5], "samples": [64, 64, 64, 64]}
    result = a_result(detected=DETECTED, facts=facts, steps=steps, unit="samples", unit_source="loader")
    assert dict(findings(result)) == {
        "torch": "2.9, Python 3.11.7, /venv/bin/python",
        "device": "H200, 2 processes that train together",
        "trains": "DistributedDataParallel(Net) (1.50 M parameters), Head (900 parameters)",
        "precision": "fp32 parameters, autocast bf16, a gradient scaler, compiled",
        "optimizer": "2 x Adam, SGD",
        "loader": "Pictures of 1,200 samples, batch 16, workers 2, prefetch 4, pinned, one of 2, made at lib/loading.py:7",
        "step": "64 samples in each process, from the loader's batches; 4 batches each; about 0.5 s "
        "(2.00 steps/s, a rough figure after so few steps)",
    }


def test_findings_report_a_missing_loader_and_omit_unknown_facts():
    told = dict(findings(a_result(detected={"num_steps": 3, "loader": None}, world_size=1)))
    assert told["loader"] == NO_LOADER
    assert told["step"] == "counts as one: the number of samples is unknown"
    assert not {"torch", "device", "memory", "trains"} & set(told)


def test_findings_without_optimizer_steps_name_loaders_and_backward_passes():
    detected = {"num_steps": 0, "loaders": ["train.py:7"], "num_backwards": 64, "optimizers": []}
    assert findings(a_result(detected=detected)) == [
        ("seen", "a DataLoader made at train.py:7; 64 backward passes; no optimizer step")
    ]


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [(1.0, "samples", "1 sample"), (2.5, "samples", "2.5 samples"), (2**20, "tokens", "1,048,576 tokens")],
)
def test_amounts_are_grammatical_and_exact(number: float, unit: str, text: str):
    detected = {"num_steps": 4, "loader": {**LOADER, "num_samples": 1}, "modules": ["Bias"], "num_parameters": [1]}
    steps = {"end_s": [0.0], "samples": [number]}
    found = a_result(detected=detected, steps=steps, unit=unit, unit_source="loader", world_size=1)
    told = dict(findings(found))
    assert told["step"] == f"{text}, from the loader's batches"
    assert told["loader"].startswith("Pictures of 1 sample, ")
    assert told["trains"] == "Bias (1 parameter)"
    seen = findings(a_result(detected={"num_steps": 0, "num_backwards": 1}))
    assert seen == [("seen", "1 backward pass; no optimizer step")]


def test_doubts_name_settings_that_did_not_take_effect():
    knobs = {"loader.batch_size": KnobReport(OVERRIDDEN, "asked 8, uses 16", 16), "precision.amp": KnobReport(APPLIED)}
    assert doubts(a_result(knobs=knobs)) == ["loader.batch_size: overridden by the program, asked 8, uses 16"]


@pytest.mark.parametrize(
    ("command", "device", "text"),
    [
        ("python train.py", "cpu", ""),
        ("torchrun --nproc_per_node=2 train.py", "cpu", ""),
        (
            "torchrun --nproc_per_node=4 train.py",
            "cpu",
            "asked for 4 processes, but only 2 train together: the others did not join",
        ),
        (
            "accelerate launch --num_processes 3 train.py",
            "cuda",
            "accelerate was asked for 3 processes, but only 2 train together",
        ),
        ("torchrun --nproc_per_node=1 train.py", "cuda", "asked for 1 process, but 2 train together: a variable such as"),
        ("accelerate launch --cpu --num_processes 8 train.py", "cpu", "On a CPU, `accelerate launch` starts one process"),
    ],
)
def test_requested_processes_that_do_not_train_together_are_reported(command, device, text):
    told = missing_processes(a_result(facts={"device": device}), command.split())
    assert text in told
    assert bool(told) == bool(text)


def test_files_in_the_working_directory_have_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert near(f"{tmp_path}/src/train.py:3") == "src/train.py:3"
