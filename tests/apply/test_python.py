"""`autotune.apply` and `autotune.trial_step`, called by programs."""

import sys

import pytest

from tests.apply.conftest import Place, ended, seen
from tests.harness.conftest import RULES, trial  # noqa: F401

CALLED = {"loader": {"batch_size": 8}, "precision": {"amp": "bf16"}, "threads": {"omp": 1}}
LIGHT = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("optuna", "mlflow", "hydra", "omegaconf", "numpy", "scipy", "psutil", "rich", "typer"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
import autotune
assert not [n for n in sys.modules if n.startswith("autotune.")]
autotune.trial_step(samples=3)
autotune.apply("best.yaml")
"""


def test_apply_before_torch_is_imported_works_like_the_command(place: Place) -> None:
    place.best(CALLED)
    done = ended(place.popen([sys.executable, "called.py", "before"]))
    assert seen(done) == {"batch": 8, "omp": "1", "heavy": [], "dtypes": ["torch.bfloat16"]}
    assert done.stderr.splitlines() == [
        "autotune: best.yaml: bf16 · batch 8 · OMP 1 (study s)",
        "autotune: all 3 settings of best.yaml are in effect",
    ]


@pytest.mark.thorough
def test_apply_after_torch_is_imported_names_settings_that_come_too_late(place: Place) -> None:
    place.best({**CALLED, "env": {"MALLOC_ARENA_MAX": "1"}, "memory": {"malloc": "glibc_keep"}})
    done = ended(place.popen([sys.executable, "called.py", "after"]))
    assert seen(done)["batch"] == 8
    assert "autotune: 3 of 5 settings of best.yaml in effect" in done.stderr
    assert "threads.omp=1: not applicable: torch was imported earlier and has read OMP_NUM_THREADS" in done.stderr
    assert "env.MALLOC_ARENA_MAX=1: not applicable: MALLOC_ARENA_MAX is read only when a process starts" in done.stderr


@pytest.mark.thorough
def test_apply_after_training_has_begun_reports_settings_without_effect(place: Place) -> None:
    place.best({"precision": {"amp": "bf16"}})
    done = ended(place.popen([sys.executable, "called.py", "late"]))
    found = seen(done)
    assert (found["batch"], found["dtypes"]) == (16, ["torch.float32"])
    assert "precision.amp=bf16: not applicable" in done.stderr


@pytest.mark.thorough
def test_apply_in_a_program_is_ignored_under_the_apply_command(place: Place) -> None:
    place.best(CALLED)
    (place.path / "other.yaml").write_text("loader: {batch_size: 4}\n")
    done = place.apply("apply", "other.yaml", "--", sys.executable, "called.py", "before")
    assert seen(done)["batch"] == 4
    assert "autotune: best.yaml is ignored: other.yaml is already applied" in done.stderr


def test_apply_needs_none_of_the_libraries_of_the_tuner(place: Place) -> None:
    place.best()
    done = ended(place.popen([sys.executable, "-c", LIGHT]))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("autotune: best.yaml") == 1


def test_apply_raises_bad_input_for_an_unusable_file(place: Place) -> None:
    done = ended(place.popen([sys.executable, "-c", "import autotune; autotune.apply('nothing.yaml')"]))
    assert "autotune.errors.BadInput: BEST: cannot be read, got 'nothing.yaml' (there is no such file)" in done.stderr


@pytest.mark.parametrize(
    ("words", "unit", "samples"),
    [(["long", "samples"], "samples", 16), pytest.param(["long"], "steps", 1, marks=pytest.mark.thorough)],
)
def test_trial_steps_reported_by_a_program_are_measured(trial, place: Place, words, unit, samples) -> None:  # noqa: F811
    run = trial(str(place.path / "by_hand.py"), *words, is_fresh=True, env={"PYTHONPATH": _path()}, rules=RULES)
    found = run.result()
    assert found.status == "measured", run.stderr
    assert found.unit == unit
    assert found.window is not None
    assert found.window.samples == samples * found.window.steps
    assert "over" not in run.stdout


@pytest.mark.thorough
def test_trial_step_does_nothing_outside_a_trial(place: Place) -> None:
    done = ended(place.popen([sys.executable, "by_hand.py"]))
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def _path() -> str:
    from tests.harness.conftest import INJECT, REPOSITORY

    return f"{INJECT}:{REPOSITORY}"
