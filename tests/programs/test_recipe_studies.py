"""Whole studies of recipes at tiny sizes, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
TEXT = ("model=gpt2_small", "model.num_layers=1", "model.hidden_size=32", "model.vocab_size=200", "data.sequence_length=16")
PARTS = """
import torch
from torch.utils.data import TensorDataset

def model(): return torch.nn.Linear(8, 3)
def data(): return TensorDataset(torch.randn(4096, 8), torch.randint(0, 3, (4096,)))
def step(model, batch): return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def autotune(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "autotune", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def inspected(*words: str, cwd: Path) -> dict[str, Any]:
    ended = autotune("inspect", *words, "--json", cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.mark.thorough
def test_study_of_a_small_tabular_recipe_reaches_a_verdict(tmp_path: Path) -> None:
    sizes = ("model.num_layers=1", "model.hidden_size=64", "loader.num_workers=0", "tiers=exact", "threads.intra=choice(1,2)")
    ended = autotune(
        "run", "model=mlp", "data=tabular", *sizes, "study.budget.minutes=1", "tracker.uri=none", "--json", cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert (summary["study"], summary["status"], summary["unit"]) == ("mlp", "complete", "samples")
    assert summary["speedup"]["verdict"] in ("faster", "same", "ambiguous")
    assert summary["counts"]["ok"] >= 2
    again = autotune("verify", "mlp", "--rounds", "2", "--minutes", "1", "tracker.uri=none", cwd=tmp_path)
    assert again.returncode in (0, 4), again.stderr


@pytest.mark.thorough
def test_text_recipe_counts_tokens_and_applies_loader_knobs(tmp_path: Path) -> None:
    found = inspected(*TEXT, "loader.batch_size=8", "loader.num_workers=1", cwd=tmp_path)["result"]
    assert (found["unit"], found["unit_source"]) == ("tokens", "loader")
    assert set(found["steps"]["samples"]) == {8 * 16}
    assert {report["status"] for report in found["knobs"].values()} == {"applied"}
    assert found["detected"]["modules"] == ["GPT2LMHeadModel"]


@pytest.mark.thorough
def test_user_defined_parts_are_trained_and_missing_parts_exit_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PARTS)
    own = ("model.factory=mine:model", "data.factory=mine:data", "train.step=mine:step")
    found = inspected(*own, "loader.batch_size=8", cwd=tmp_path)["result"]
    assert (found["unit"], found["detected"]["loader"]["num_samples"]) == ("samples", 4096)
    assert found["knobs"]["loader.batch_size"]["status"] == "applied"
    ended = autotune("run", *own[:2], "train.step=mine:stp", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "train.step: cannot be used, got 'mine:stp'" in ended.stderr
    assert not (tmp_path / "runs").exists()
