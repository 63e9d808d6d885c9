"""`autotune apply` reads what `autotune export` writes."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.config.best_file import read_best
from autotune.export.formats import render
from tests.support.studies import make_study

TARGET = [{"site": "/home/${USER}/train.py:12", "ordinal": 0, "code": "train.py:main:3f2a9c1b2d4e:shuffled", "nth": 0}]
COMMAND = ["python", "train.py", "--size", "{loader.batch_size=16}", "--workers={loader.num_workers=0}", "${HOME}"]


@pytest.fixture
def best(tmp_path: Path):
    summary = make_study(tmp_path / "runs").read_summary()
    summary |= {"target": TARGET, "command": COMMAND, "is_recipe": False, "pinned": {"env.WHERE": "${HOME}"}}
    summary["identity"] = {"program.torch": "2.14.1", "machine.num_cores": 2}
    (tmp_path / "best.yaml").write_text(render(summary, "yaml", None).text)
    return read_best(tmp_path / "best.yaml")


def test_exported_knobs_loader_command_and_machine_are_read_back_unchanged(best):
    assert best.knobs == {
        "precision.amp": "bf16", "layout.channels_last": True, "loader.num_workers": 2, "loader.batch_size": 64,
        "env.WHERE": "${HOME}",
    }  # fmt: skip
    assert best.environment() == {"WHERE": "${HOME}"}
    assert (best.target, best.command, best.is_recipe) == (TARGET, COMMAND, False)
    assert best.identity == {"program.torch": "2.14.1", "machine.num_cores": 2}
    assert best.origin[:2] == ("resnet18", "2.41x")


def test_ambiguous_ratio_is_marked_as_ambiguous(best, tmp_path):
    text = Path(best.file).read_text()
    Path(best.file).write_text(text.replace('verdict: "faster"', 'verdict: "ambiguous"', 1))
    assert read_best(tmp_path / "best.yaml").origin[1] == "2.41x, ambiguous"


def test_command_must_pass_the_knobs_that_the_command_of_the_study_passed(best):
    assert best.handed_over(["x", "--size", "64", "--workers=2"]) == ({"loader.batch_size": 64, "loader.num_workers": 2}, [])
    assert best.handed_over(["--size=64", "--workers=2"])[1] == []
    passed, problems = best.handed_over(["--size", "16", "--workers=2"])
    assert passed == {"loader.num_workers": 2}
    assert len(problems) == 1
    assert "`--size {loader.batch_size=16}`" in problems[0]
    assert best.handed_over(["--bs", "64"], known=["loader.batch_size", "loader.num_workers"]) == ({}, [])


def test_knobs_in_consecutive_arguments_without_options_are_recognised(best):
    """The second one was looked for after the unfilled placeholder of the first, so every command was refused."""
    positional = replace(best, command=["python", "train.py", "{loader.batch_size=16}", "{loader.num_workers=0}"])
    passed = {"loader.batch_size": 64, "loader.num_workers": 2}
    assert positional.handed_over(["python", "train.py", "64", "2"]) == (passed, [])
    assert len(positional.handed_over(["python", "train.py", "64", "0"])[1]) == 1


def test_truth_value_in_the_command_is_spelled_as_in_the_command_of_the_study(best):
    passing = replace(best, command=["python", "train.py", "--nhwc={layout.channels_last=false}"])
    assert passing.handed_over(["python", "train.py", "--nhwc=true"]) == ({"layout.channels_last": True}, [])
    assert len(passing.handed_over(["python", "train.py", "--nhwc=false"])[1]) == 1


def test_incomplete_description_of_the_loader_is_ignored(tmp_path):
    file = tmp_path / "best.yaml"
    for target in ("3", "[]", "[{site: here}]", "[{site: 3, ordinal: 0}]", "[1]"):
        file.write_text(f"threads: {{intra: 1}}\nprovenance: {{target: {target}}}\n")
        assert read_best(file).target is None
    file.write_text("threads: {intra: 1}\nprovenance: {target: [{site: 'a.py:1', ordinal: 0}]}\n")
    assert read_best(file).target == [{"site": "a.py:1", "ordinal": 0}]
