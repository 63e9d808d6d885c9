"""The real libraries load the exported files and read the measured settings from them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.export import accelerate, deepspeed, huggingface, lightning
from autotune.export.formats import render
from autotune.export.winner import winner
from autotune.knobs.catalogue import CATALOGUE

HERE = Path(__file__).parent
OVERRIDES = {
    "loader.batch_size": 64,
    "loader.num_workers": 2,
    "loader.prefetch_factor": 4,
    "loader.pin_memory": False,
    "loader.persistent_workers": True,
    "precision.amp": "bf16",
    "precision.matmul": "highest",
    "compile.mode": "reduce-overhead",
    "optimizer.implementation": "fused",
    "backend.cudnn_benchmark": True,
    "threads.omp": 2,
}


def study(overrides):
    entry = {"trial": 7, "value": 180.0, "ci": None, "overrides": overrides, "knobs": overrides}
    return {
        "study": "s", "title": "python train.py", "status": "complete", "objective": "throughput", "unit": "samples",
        "machine": {"cpu_model": "Fake CPU", "num_cores": 4, "device": "cpu"}, "fingerprint": "abc", "versions": {},
        "baseline": {"trial": 0, "value": 100.0, "ci": None, "knobs": {}}, "best": entry, "best_by_tier": {},
        "speedup": {"ratio": 1.8, "ci": [1.75, 1.85], "verdict": "faster", "reason": ""}, "started_at": 1_750_000_000.0,
        "pinned": {}, "detected": {"optimizers": ["AdamW"], "world_size": 1}, "trials": [],
    }  # fmt: skip


def python(*words, cwd):
    environment = {name: text for name, text in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONWARNINGS")}
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd, env={**environment, **quiet}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Returns what each library read, or the error it raised. One process loads all libraries, since imports are slow."""
    folder = tmp_path_factory.mktemp("exported")
    for name in ("hf.yaml", "hf.json", "lightning.yaml", "accelerate.yaml", "accelerate.json", "deepspeed.json"):
        (folder / name).write_text(render(study(OVERRIDES), name.partition(".")[0], None, file=name).text)
    done = python(HERE / "libraries.py", folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def read(answers):
    def _read(library):
        assert isinstance(answers[library], dict), answers[library]
        return answers[library]

    return _read


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_training_arguments_accept_the_exported_file(read, ending):
    assert read("hugging_face")[ending] == {
        "per_device_train_batch_size": 64, "dataloader_num_workers": 2, "dataloader_prefetch_factor": 4,
        "dataloader_pin_memory": False, "dataloader_persistent_workers": True, "bf16": True, "tf32": False,
        "torch_compile": True, "torch_compile_mode": "reduce-overhead", "optim": "adamw_torch_fused", "use_cpu": True,
    }  # fmt: skip


@pytest.mark.thorough
def test_training_arguments_have_all_exported_names(read):
    values = {**OVERRIDES, "precision.matmul": "high"}
    for device in ("cpu", "cuda"):
        summary = study(values)
        summary["machine"]["device"] = device
        written = huggingface.document(winner(summary, None)).settings
        assert set(written) <= set(read("hugging_face")["fields"])
        assert len(written) >= 10


@pytest.mark.thorough
def test_lightning_trainer_cli_and_loader_accept_the_exported_file(read):
    assert read("lightning") == {"trainer": ["bf16-mixed", True], "cli": ["bf16-mixed", True], "loader": [64, 2, 4, False]}


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_accelerate_reads_the_exported_file(read, ending):
    assert read("accelerate")[ending] == {
        "mixed_precision": "bf16", "distributed_type": "NO", "num_processes": 1, "use_cpu": True,
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead"},
    }  # fmt: skip


@pytest.mark.thorough
def test_accelerate_launches_a_script_with_the_exported_file(tmp_path):
    (tmp_path / "best.yaml").write_text(render(study(OVERRIDES), "accelerate", None).text)
    words = ["-m", "accelerate.commands.launch", "--config_file", "best.yaml", "--num_cpu_threads_per_process", "2"]
    done = python(*words, HERE / "launched.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "mixed_precision": "bf16", "device": "cpu", "num_processes": 1, "dynamo": ["INDUCTOR", "reduce-overhead"],
        "model": "OptimizedModule", "dtype": "torch.bfloat16", "OMP_NUM_THREADS": "2",
    }  # fmt: skip


@pytest.mark.thorough
def test_deepspeed_accepts_the_exported_file(read):
    assert read("deepspeed") == {"micro_batch": 64, "autocast": [True, "torch.bfloat16"], "bf16": False}


def test_all_rows_refer_to_existing_knobs():
    for rows in (huggingface.ROWS, lightning.ROWS, accelerate.ROWS, deepspeed.ROWS):
        assert set(rows) <= set(CATALOGUE)
