"""Notes on words that the user probably meant differently, printed before anything runs."""

import json
import os
import sys

import pytest

from autotune.cli.apply import _of_another_program, _shutting_out
from autotune.cli.main import main
from autotune.config.best_file import Best
from autotune.run_dir import StudyFolder
from tests.support.studies import make_study

BEST = """# @package _global_
precision:
  amp: "bf16"
provenance:
  study: "resnet18"
  settings:
    model.name: "resnet18"
    model.factory: "evil:build"
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('never run')", encoding="utf-8")
    return tmp_path


def dry_run(capsys, *words):
    assert main(["run", "--dry-run", *words]) == 0
    return capsys.readouterr()


def test_setting_after_the_dashes_is_noted_as_a_program_argument(capsys):
    said = dry_run(capsys, "--", sys.executable, "train.py", "loader.num_workers=2", "lr=0.1", "optim.lr=3").err
    assert said.count("after '--'") == 1
    assert "loader.num_workers: after '--' it is an argument of your program" in said


def test_note_says_that_a_secret_in_the_command_prevents_resuming(capsys):
    said = dry_run(capsys, "--", sys.executable, "train.py", "--lr", "1", "--api-key", "abc123").err
    assert "COMMAND: contains a secret, got `--api-key '***'`" in said
    assert "abc123" not in said
    assert "secret" not in dry_run(capsys, "--", sys.executable, "train.py", "--eos_token_id", "2", "--image-key", "jpg").err


def test_command_that_runs_the_program_elsewhere_is_noted(capsys, place, monkeypatch):
    tool = place / "docker"
    tool.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=":")
    assert "docker runs the program where autotune cannot measure it" in dry_run(capsys, "--", "docker", "run", "image").err
    tool.rename(place / "mpirun")
    said = dry_run(capsys, "--", "mpirun", "-H", "n1,n2", sys.executable, "train.py").err
    assert "processes that mpirun -H starts on other machines run without autotune" in said


def test_dry_run_searches_only_knobs_that_can_be_changed_here_or_are_named(capsys):
    one = json.loads(dry_run(capsys, "--json", "--", sys.executable, "train.py").out)
    assert not any(key.startswith("parallel.") for key in one["searching"])
    assert any(key.startswith("parallel.") for key in one["unavailable"])
    named = json.loads(dry_run(capsys, "--json", "parallel.bucket_cap_mb=choice(25,50)", "--", sys.executable, "train.py").out)
    assert "parallel.bucket_cap_mb" in named["searching"], "a knob that the user names stays"


def test_dry_run_of_a_shell_script_does_not_call_knobs_of_several_ranks_unavailable(capsys, place):
    """The script may start several processes; only the baseline shows that."""
    (place / "train.sh").write_text("torchrun --nproc-per-node 2 train.py", encoding="utf-8")
    plan = json.loads(dry_run(capsys, "--json", "--", "bash", "train.sh").out)
    assert any(key.startswith("parallel.") for key in plan["searching"])
    assert not any(key.startswith("parallel.") for key in plan["unavailable"])


def test_best_yaml_selects_its_recipe_unless_a_model_is_given(capsys, place):
    (place / "runs" / "resnet18").mkdir(parents=True)
    (place / "runs" / "resnet18" / "best.yaml").write_text(BEST, encoding="utf-8")
    said = dry_run(capsys, "--config-dir", "runs", "+resnet18=best").out
    assert "study  resnet18" in said
    assert "pinned  bf16" in said
    assert "evil" not in said
    assert "study  mlp" in dry_run(capsys, "--config-dir", "runs", "+resnet18=best", "model=mlp").out


def test_best_yaml_of_another_program_is_noted():
    best = Best(file="best.yaml", knobs={}, command=["python", "train.py"])
    assert _of_another_program(best, ["python", "train.py", "--epochs", "9"]) == []
    (line,) = _of_another_program(best, ["torchrun", "--nproc_per_node=2", "other.py"])
    assert line == "best.yaml was made for another program (train.py): settings that do not exist in other.py are not applied"


def test_note_warns_of_a_command_that_would_run_without_the_settings(place):
    for name, path in (("bad", "src"), ("good", "src:$PYTHONPATH")):
        (place / f"{name}.sh").write_text(
            f"#!/bin/sh\n# PYTHONPATH=x\nexport PYTHONPATH={path}\npython train.py\n", encoding="utf-8"
        )
    for command in ("python train.py", "sh good.sh", "./good.sh", "env PYTHONPATH=src python train.py", "sh missing.sh"):
        assert _shutting_out(command.split()) == []
    for words in (["sh", "bad.sh"], ["./bad.sh"], ["sh", "-c", "cd x\nPYTHONPATH=src python train.py"]):
        (line,) = _shutting_out(words)
        assert "PYTHONPATH=src:$PYTHONPATH" in line
    assert "inside docker" in _shutting_out(["docker", "run", "image"])[0]
    os.mkfifo(place / "pipe.sh")  # as in `bash <(...)`
    assert _shutting_out(["sh", "pipe.sh"]) == []


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -I train.py", "only environment variables may take effect: Python is started with -I"),
        ("env A=1 python3 -u -sE -m train", "only environment variables may take effect: Python is started with -sE"),
        ("env -i python train.py", "no setting can take effect: env -i removes them"),
        ("python -u train.py -I", ""),
        ("python -m train -E", ""),
        ("python -mIPython train.py -S", ""),
        ("python -Werror::ImportWarning -s -P train.py", ""),
        ("env -u A python train.py", ""),
        ("deepspeed --hostfile hosts train.py", "processes that deepspeed --hostfile starts on other machines run without"),
        ("nohup deepspeed -H=hosts train.py", "processes that deepspeed -H starts on other machines run without"),
        ("deepspeed --hostfile hosts --launcher slurm train.py", ""),
        ("deepspeed --num_gpus 2 train.py --hostfile hosts", ""),
        ("accelerate launch --deepspeed_hostfile=h train.py", "processes that accelerate --deepspeed_hostfile starts on"),
        ("mpirun -np 2 -H n1,n2 python train.py", "processes that mpirun -H starts on other machines run without the settings"),
        ("mpirun -H n1,n2 -x AUTOTUNE_SPEC -x PYTHONPATH python train.py", ""),
        ("mpirun -np 2 python train.py -H 8", ""),
    ],
)
def test_note_warns_of_an_option_that_keeps_the_settings_out(command, expected):
    assert [note[: len(expected)] for note in _shutting_out(command.split())] == [expected] * bool(expected)


def test_damaged_study_record_is_reported(capsys, place):
    folder = StudyFolder(place / "runs" / "s")
    folder.path.mkdir(parents=True)
    folder.study_file.write_text("{", encoding="utf-8")
    assert main(["show", "runs/s"]) == 2
    assert "study.json: not a study" in capsys.readouterr().err


def test_export_and_knobs_print_json(capsys, place):
    make_study(place / "runs", "resnet18")
    assert main(["export", "resnet18", "--json", "-o", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["study"], document["format"]) == ("resnet18", "yaml")
    assert "precision" in document["text"]
    assert main(["knobs", "precision.amp", "--json"]) == 0
    (knob,) = json.loads(capsys.readouterr().out)
    assert knob["key"] == "precision.amp"
    assert "default" in knob["search_spaces"]


@pytest.mark.parametrize("name", ["env", "loader.*", "step"])
def test_knobs_of_a_family_are_the_same_as_lines_and_as_json(capsys, name):
    assert main(["knobs", name, "--json"]) == 0
    keys = [knob["key"] for knob in json.loads(capsys.readouterr().out)]
    assert main(["knobs", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert keys == [word for line in lines for word in line.split()[:2] if word.startswith(f"{name.removesuffix('.*')}.")]


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_wraps_the_list_of_knobs_and_cuts_nothing(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["knobs", "loader"]) == 0
    said = capsys.readouterr().out
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= width


def test_quiet_study_prints_only_its_verdict(capsys, place):
    from autotune.cli.plain import OnlyVerdict

    folder = make_study(place / "runs", "resnet18")
    view = OnlyVerdict(folder.path)
    view.notice("disk is nearly full")
    view.finished(folder.read_summary())
    said = capsys.readouterr()
    assert said.err == "autotune: disk is nearly full\n"
    assert said.out.startswith("verdict  ")
