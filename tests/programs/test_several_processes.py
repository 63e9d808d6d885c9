"""Studies of multi-process programs reach a verdict: a recipe, and a Trainer under the user's torchrun."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.launchers.environment import own_environment
from tests.faults.trial_studies import QUICK

pytestmark = pytest.mark.thorough

SCRIPTS = Path(__file__).with_name("scripts")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def study(folder: Path, *words: str) -> dict[str, Any]:
    """Runs `autotune run` with a search over one knob; returns what `show --json` prints."""
    (folder / "space.yaml").write_text('{"parallel.gradient_as_bucket_view": [false, true]}')
    environment = {**own_environment(), "XDG_CACHE_HOME": str(folder / "cache")}
    environment.pop("OMP_NUM_THREADS", None)
    for command in (["run", *QUICK, "search_space=space.yaml", "study.budget.minutes=2.5", *words], ["show", "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "autotune", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def check(summary: dict[str, Any]) -> None:
    assert summary["status"] == "complete"
    assert summary["speedup"]["verdict"]
    baseline, other = summary["trials"][:2]
    assert (baseline["outcome"], other["outcome"]) == ("ok", "ok")
    assert other["changed"] == {"parallel.gradient_as_bucket_view": True}
    for ranks in (baseline["ranks"], other["ranks"]):
        assert ranks["world_size"] == 2
        assert [entry["rank"] for entry in ranks["by_rank"]] == [0, 1]
        assert all(entry["peak_memory_bytes"] > 2**26 for entry in ranks["by_rank"])
        assert 0 < ranks["communication"]["exposed_s"] < max(entry["step_s"] for entry in ranks["by_rank"])
        assert ranks["communication"]["bound_s"] > 0
    step_s = max(entry["step_s"] for entry in baseline["ranks"]["by_rank"])
    assert baseline["value"] == pytest.approx(2 * baseline["knobs"]["loader.batch_size"] / step_s, rel=0.02)


def test_study_of_a_recipe_in_two_processes_reaches_a_verdict(tmp_path: Path) -> None:
    small = ("model=resnet18", "model.image_size=32", "data=fake_cifar", "loader.batch_size=4", "launch.nproc=2")
    check(study(tmp_path, *small))


def test_study_of_a_trainer_under_torchrun_reaches_a_verdict(tmp_path: Path) -> None:
    for name in ("hf_trainer.py", "journal.py"):
        shutil.copy(SCRIPTS / name, tmp_path)
    check(study(tmp_path, "--", *TORCHRUN, "hf_trainer.py", "out"))
