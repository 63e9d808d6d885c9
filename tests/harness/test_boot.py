"""Getting in: the hook is not used up, is not left behind, and harms nobody who does not train."""

import json
import sys
from pathlib import Path

from tests.harness.conftest import Trial


def test_asking_whether_torch_is_there_does_not_use_the_hook_up(trial: Trial, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nos.environ['OWN_SITE'] = 'ran'\n")
    inject = Path(__file__).resolve().parents[2] / "autotune" / "harness" / "inject"
    found = trial("entry.py", mode="inspect", env={"PYTHONPATH": f"{inject}:{own}"})
    assert found.result().status == "measured"
    assert "own site: ran" in found.stdout
    assert "plain loader: True" in found.stdout
    assert "finders left: 0" in found.stdout


def test_an_isolated_interpreter_leaves_no_trace(trial: Trial) -> None:
    run = trial("no_torch.py", argv=[sys.executable, "-I"])
    assert (run.returncode, run.stdout) == (0, "fine\n")
    assert [path.name for path in run.folder.iterdir()] == ["spec.json"]


def test_a_program_without_torch_is_left_alone(trial: Trial) -> None:
    run = trial("no_torch.py")
    assert (run.returncode, run.stdout, run.stderr) == (0, "fine\n", "")
    assert sorted(path.name for path in run.folder.iterdir()) == ["progress.jsonl", "spec.json"]
    assert json.loads((run.folder / "progress.jsonl").read_text())["phase"] == "spawn"
