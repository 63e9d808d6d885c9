"""Files and commands that cannot be used end with exit code 2 and one line, before anything is started."""

import shlex
import sys
from pathlib import Path

import pytest
import yaml

from autotune.cli.main import main
from autotune.config.best_file import read_best
from autotune.errors import BadInput
from tests.support.studies import make_study

PYTHON = ["--", sys.executable, "-c", "pass"]
FILES = {
    "missing": (None, "BEST: cannot be read, got 'best.yaml' (there is no such file)"),
    "empty": ("", "BEST: nothing to apply, got 'best.yaml' without any knob"),
    "other": ("- 1\n", "BEST: not a mapping of keys to values, got [1]"),
    "unknown": ("loader: {batch_sise: 8}\n", "loader.batch_sise: not a knob, got 8. Did you mean 'loader.batch_size'?"),
    "setting": ("study: {seed: 8}\n", "study.seed: not a knob, got 8."),
    "flat": ("loader: 8\n", "loader: not a knob, got 8."),
    "value": ("loader: {num_workers: many}\n", "loader.num_workers: not a whole number, got 'many'"),
    "impossible": ("loader: {num_workers: -1}\n", "loader.num_workers: too small, got -1"),
    "reference": ("env: {HOME: '${oc.env:HOME}'}\n", "env.HOME: a reference, got '${oc.env:HOME}'"),
    "masked": ("env: {HF_TOKEN: '***1'}\n", "env.HF_TOKEN: a secret that is masked in the file, got '***1'"),
    "lost": ("provenance: {secret: [env.A_TOKEN]}\n", "env.A_TOKEN: a secret whose value is neither in 'best.yaml' nor"),
    "both": (
        "env: {LD_PRELOAD: x.so}\nmemory: {malloc: glibc}\n",
        "env.LD_PRELOAD: sets the same variable as memory.malloc, got both. Give one of the two. Both are in best.yaml.",
    ),
    "another": (
        "schema: 1\nstudy: s\ntitle: t\n",
        "BEST: not a best.yaml, got 'best.yaml', whose keys are not knobs (schema, ",
    ),
    "own": ("env: {AUTOTUNE_SPEC: x}\n", "env.AUTOTUNE_SPEC: not free to tune"),
}


@pytest.fixture(autouse=True)
def _cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("A_TOKEN", raising=False)


@pytest.mark.parametrize("name", FILES)
def test_unusable_file_is_refused_in_one_line(name, capsys):
    text, expected = FILES[name]
    if text is not None:
        Path("best.yaml").write_text(text)
    assert main(["apply", "best.yaml", *PYTHON]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"autotune: {expected}"), said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "COMMAND: missing, and best.yaml was made for your own program"),
        (["--"], "COMMAND: nothing after '--'"),
        (["--", "no-such-program"], "COMMAND: no such program, got 'no-such-program'"),
        (["--", "python", "gone.py"], "COMMAND: no such script, got 'gone.py'"),
        (["threads.intra=1", *PYTHON], "threads.intra: can only be set for a recipe, got 'threads.intra=1'"),
        (["+threads.intra=1", *PYTHON], "threads.intra: can only be set for a recipe, got '+threads.intra=1'"),
        (["--", "python", "-c", "pass", "{loader.sise}"], "COMMAND: no such placeholder"),
    ],
)
def test_unusable_command_is_refused_in_one_line(words, expected, capsys):
    Path("best.yaml").write_text("threads: {intra: 1}\n")
    assert main(["apply", "best.yaml", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"autotune: {expected}"), said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("loader.num_workers=choice(0,4)", "loader.num_workers: `apply` searches nothing, got 'loader.num_workers=choice"),
        ("launcher=slurm", "launcher: has no effect on `apply`, which trains once, on this machine, got 'launcher=slurm'."),
        ("study.budget.minutes=5", "study.budget.minutes: has no effect on `apply`"),
        ("search_space=quick", "search_space: has no effect on `apply`"),
        ("++threads.intra=2", "threads.intra: set by best.yaml, got it on the command line too."),
    ],
)
def test_override_without_effect_on_the_training_of_a_recipe_is_refused(word, expected, capsys):
    said = {"settings": {"model.name": "mlp", "data.name": "tabular"}, "speedup": {"ratio": 1.5}}
    Path("best.yaml").write_text(yaml.safe_dump({"threads": {"intra": 1}, "provenance": said}))
    assert main(["apply", "best.yaml", "--dry-run", "train.epochs=2", "launch.nproc=1", "threads.omp=1", word]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"autotune: {expected}"), err
    assert err.count("\n") == 1


def test_apply_is_refused_inside_a_trial(capsys, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_SPEC", "/runs/s/trials/0000/spec.json")
    Path("best.yaml").write_text("threads: {intra: 1}\n")
    assert main(["apply", "best.yaml", *PYTHON]) == 2
    assert "a trial gets its settings from its study" in capsys.readouterr().err


def test_all_problems_of_a_file_are_reported_at_once():
    Path("best.yaml").write_text("loader: {num_workers: -1, batch_sise: 2}\nprecision: {amp: bf17}\n")
    with pytest.raises(BadInput) as caught:
        read_best(Path("best.yaml"))
    assert len(caught.value.problems) == 3


def test_more_workers_than_this_machine_has_cores_are_not_refused():
    Path("best.yaml").write_text("loader: {num_workers: 96}\n")
    assert read_best(Path("best.yaml")).knobs == {"loader.num_workers": 96}


def test_secret_in_the_environment_need_not_be_in_the_file(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    Path("best.yaml").write_text("provenance: {secret: [env.A_TOKEN]}\nthreads: {intra: 1}\n")
    assert read_best(Path("best.yaml")).knobs == {"threads.intra": 1}


def test_suggested_command_finds_a_study_in_another_runs_folder(capsys):
    study = make_study(Path("elsewhere"), "s")
    study.best_file.write_text("threads: {intra: 1}\nprovenance: {program: {command: [python, -c, pass]}}\n")
    assert main(["apply", "s", "--runs-dir", "elsewhere"]) == 2
    suggested = capsys.readouterr().err.partition("type `")[2].partition("`")[0]
    assert main([*shlex.split(suggested)[1:-4], "--dry-run", *PYTHON]) == 0, suggested
