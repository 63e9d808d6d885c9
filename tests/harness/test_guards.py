"""`if __name__ == "__main__":` is detected in every spelling. Without it, workers that import the module would train."""

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
lines = []
def begin():
    lines.append(startable.main_line())
def main():
    begin()
    print("found:", startable.problem({{}}, startable.main_line(), [line for line in lines if line]))
"""
GUARDED = {
    "double quotes": 'if __name__ == "__main__":\n    main()',
    "single quotes": "if __name__ == '__main__':\n    main()",
    "the other way round": "if '__main__' == __name__:\n    main()",
    "in a try": "try:\n    if __name__ == '__main__':\n        main()\nexcept KeyboardInterrupt:\n    pass",
    "in a with": "import contextlib\nwith contextlib.suppress(OSError):\n    if __name__ == '__main__':\n        main()",
    "asked beforehand": "is_main = __name__ == '__main__'\nif is_main:\n    main()",
    "and": "__name__ == '__main__' and main()",
    "with another condition": "if sys.argv and __name__ == '__main__':\n    main()",
    "the other branch": "if __name__ != '__main__':\n    pass\nelse:\n    main()",
    "asked by a function": "def is_main():\n    return __name__ == '__main__'\nif is_main():\n    main()",
    "a call over many lines": "if __name__ == '__main__':\n    sys.exit(\n        main(\n        )\n    )",
}


def found(folder: Path, body: str, *words: str, name: str = "train.py") -> str:
    """Returns the verdict on a program that makes its loader in `main()`."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(TOP.format(repository=str(REPOSITORY)) + body + "\n")
    done = subprocess.run(
        [sys.executable, *(words or [name])], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    assert "found:" in done.stdout, done.stderr
    return done.stdout.rpartition("found:")[2].strip()


@pytest.mark.parametrize("spelling", GUARDED)
def test_main_guard_is_recognised_in_every_spelling(tmp_path: Path, spelling: str) -> None:
    assert found(tmp_path, GUARDED[spelling]) == ""


def test_program_without_a_guard_is_reported_with_its_file(tmp_path: Path) -> None:
    said = found(tmp_path, "main()")
    assert "main module (train.py)" in said
    assert said.endswith('it has no `if __name__ == "__main__":`')


def test_guard_that_does_not_contain_the_training_is_reported(tmp_path: Path) -> None:
    said = found(tmp_path, "main()\nif __name__ == '__main__':\n    pass")
    assert said.endswith('it trains outside its `if __name__ == "__main__":`')


def test_batch_fetched_at_module_level_counts_as_training_outside_the_guard(tmp_path: Path) -> None:
    assert "it trains outside its" in found(tmp_path, "begin()\nif __name__ == '__main__':\n    main()")


def test_a_loader_made_at_module_level_may_be_used_under_the_guard(tmp_path: Path) -> None:
    body = "line = startable.main_line()\nif __name__ == '__main__':\n    print('found:', startable.problem({}, line))"
    assert found(tmp_path, body) == ""


@pytest.mark.parametrize("words", [("-m", "pkg"), ("pkg",)])
def test_workers_do_not_import_the_main_file_of_a_package(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert found(tmp_path, "main()", *words, name="pkg/__main__.py") == ""


def test_module_that_is_run_with_m_is_imported_by_workers(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    assert "main module (train.py)" in found(tmp_path, "main()", "-m", "pkg.train", name="pkg/train.py")
    assert found(tmp_path, GUARDED["single quotes"], "-m", "pkg.train", name="pkg/train.py") == ""


def test_guard_of_a_program_that_runpy_runs_counts(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text("import runpy\n\nrunpy.run_path('train.py', run_name='__main__')\n")
    assert found(tmp_path, GUARDED["single quotes"], "launch.py") == ""


def test_workers_import_an_unguarded_launcher_instead_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text("import train\ntrain.main()\n")
    assert "main module (launch.py)" in found(tmp_path, GUARDED["single quotes"], "launch.py")


@pytest.mark.thorough
def test_start_method_can_be_set_for_a_loader_at_module_level(trial: Trial) -> None:
    baseline = trial("module_level.py", mode="inspect").result()
    assert CONTEXT not in baseline.applicability
    run = trial("module_level.py", knobs={CONTEXT: "spawn"}, target=baseline.target, mode="inspect")
    assert run.result().knobs[CONTEXT].status == "applied"


@pytest.mark.thorough
def test_rank_that_was_started_by_spawn_needs_no_guard(trial: Trial) -> None:
    run = trial("module_level.py", "spawned", mode="inspect", is_fresh=True)
    assert CONTEXT not in run.result().applicability
