"""Workers that import the main module would train again if it does not test its name."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.conftest import REPOSITORY, Trial

CONTEXT = "loader.multiprocessing_context"
TOP = """
import sys
sys.path.insert(0, {repository!r})
from autotune.harness import startable
def main():
    print("found:", startable.problem({{}}))
"""
GUARD = "if __name__ == '__main__':\n    main()"


def found(folder: Path, body: str, *words: str, name: str = "train.py") -> str:
    """Returns the verdict on a program that makes its loader in `main()`."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(TOP.format(repository=str(REPOSITORY)) + body + "\n")
    done = subprocess.run(
        [sys.executable, *(words or [name])], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    assert "found:" in done.stdout, done.stderr
    return done.stdout.rpartition("found:")[2].strip()


def test_program_without_a_guard_is_reported_with_its_file(tmp_path: Path) -> None:
    said = found(tmp_path, "main()")
    assert "main module (train.py)" in said
    assert said.endswith('it has no `if __name__ == "__main__":`')
    assert found(tmp_path, GUARD) == ""


@pytest.mark.parametrize("words", [("-m", "pkg"), ("pkg",)])
def test_workers_do_not_import_the_main_file_of_a_package(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert found(tmp_path, "main()", *words, name="pkg/__main__.py") == ""


def test_module_that_is_run_with_m_is_imported_by_workers(tmp_path: Path) -> None:
    assert "main module (train.py)" in found(tmp_path, "main()", "-m", "pkg.train", name="pkg/train.py")
    assert found(tmp_path, GUARD, "-m", "pkg.train", name="pkg/train.py") == ""


def test_workers_import_an_unguarded_launcher_instead_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text("import train\ntrain.main()\n")
    assert "main module (launch.py)" in found(tmp_path, GUARD, "launch.py")


@pytest.mark.thorough
def test_start_method_can_be_set_for_a_loader_at_module_level(trial: Trial) -> None:
    baseline = trial("module_level.py", mode="inspect").result()
    assert CONTEXT not in baseline.applicability
    run = trial("module_level.py", knobs={CONTEXT: "spawn"}, target=baseline.target, mode="inspect")
    assert run.result().knobs[CONTEXT].status == "applied"
