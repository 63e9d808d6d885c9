"""Finds which program a command runs. The study's name and the checks before the start depend on that program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotune.config.command import CommandTemplate, study_name, title
from autotune.config.schema import StudyConfig
from autotune.config.startable import startable
from autotune.config.wrapped_commands import program_of
from autotune.masking import Secrets


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py", "train"),
        ("python3.11 -u -X dev -W error src/train.v2.py --epochs 3", "train-v2"),
        ("python -m pkg.train --epochs 3", "pkg-train"),
        ("python -um pkg.train", "pkg-train"),
        ("python pkg", "pkg"),
        ("python", "python"),
        ("./train.py", "train"),
        ("./train --config x.yaml", "train"),
        ("my-trainer --data x", "my-trainer"),
        ("bash train.sh", "train"),
        ("bash -x train.sh other.sh", "train"),
        ("bash -euo pipefail scripts/finetune.sh", "finetune"),
        ("sh -- run_it", "run_it"),
        ("torchrun --nproc_per_node=2 train.py --lr 1", "train"),
        ("torchrun --nproc_per_node 2 --standalone train.py conf.py", "train"),
        ("torchrun --nproc_per_node 2 -m pkg.train", "pkg-train"),
        ("torchrun --no-python bash train.sh", "train"),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", "train"),
        ("accelerate launch --num_processes 2 --multi_gpu train.py", "train"),
        ("accelerate launch --mixed_precision bf16 -m pkg.train", "pkg-train"),
        ("accelerate-launch train.py", "train"),
        ("deepspeed --num_gpus 2 train.py --deepspeed", "train"),
        ("env LR=1 python x.py", "x"),
        ("env -u FOO -i LR=1 python x.py", "x"),
        ("nohup python x.py", "x"),
        ("nohup nice -n 10 python x.py", "x"),
        ("timeout -k 5 60 bash x.sh", "x"),
        ("taskset -c 0-3 python x.py", "x"),
        ("numactl --cpunodebind=0 python -m pkg.x", "pkg-x"),
        ("stdbuf -oL ./x.sh", "x"),
        ("uv run python x.py", "x"),
        ("uv run --with numpy x.py", "x"),
        ("uv run -m pkg.x", "uv"),
        ("poetry run python x.py", "x"),
        ("conda run -n python python x.py", "x"),
        ("mpirun -np 2 python x.py", "x"),
        ("nsys profile -o out python x.py", "x"),
        ("nohup ./x --lr 1", "x"),
        ("python -m accelerate.commands.launch x.py", "x"),
    ],
)
def test_a_study_is_named_after_the_script(command: str, name: str) -> None:
    assert study_name(CommandTemplate(parts=command.split()), StudyConfig()) == name


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["bash", "-c", "cd src && python train.py --lr 1"], "train"),
        (["bash", "-ec", "exec ./go.sh 'a b"], "go"),
        (["bash", "-c", "true"], "bash"),
        (["python", "-c", "print(1)"], "python"),
        (["python", "/opt/mlartifacts.py"], "mlartifacts-py"),
        (["python", "loader.py"], "loader"),
        (["python", "2026.py"], "study-2026"),
        (["python", "\u8bad\u7ec3.py"], "study"),
    ],
)
def test_study_names_are_valid_for_folders_and_for_hydra(command: list[str], name: str) -> None:
    assert study_name(CommandTemplate(parts=command), StudyConfig()) == name


@pytest.mark.parametrize(
    "command",
    [
        "uv run --directory elsewhere python x.py",
        "env -C elsewhere python x.py",
        "env --chdir=elsewhere bash x.sh",
        "mpirun -np 2 python x.py",  # perhaps on another host
        "docker run image python x.py",
        "torchrun --some_new_flag value ./x",
    ],
)
def test_script_that_may_be_in_another_folder_is_uncertain(command: str) -> None:
    assert not program_of(command.split()).is_certain


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py"],
        ["python", "-u", "-X", "dev", "-W", "error", "train.py", "nosuch.py"],
        ["python", "package"],
        ["python", "-m", "nosuch.module"],
        ["python", "-m", "train"],
        ["python", "-c", "print(1)"],
        ["python", "{env.SCRIPT}"],
        ["bash", "start.sh"],
        ["bash", "true"],  # on PATH
        ["sh", "-c", "exit 0"],
        ["env", "A=1", "python", "train.py"],
        ["env", "-C", "nosuch", "python", "elsewhere.py"],
        ["./start.sh"],
        ["./binary"],
        ["torchrun", "--unheard_of", "train", "x.py"],
        ["accelerate", "config"],
    ],
    ids=" ".join,
)
def test_commands_that_may_start_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    for name in ("train.py", "start.sh", "bin/torchrun", "bin/accelerate", "bin/python", "package/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "binary").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert startable(command, tmp_path) == []


def test_a_title_is_one_line_without_the_interpreters_folder() -> None:
    parts = ["/opt/venv/bin/python", "-c", "import x\nx.train()\x1b[31m", "--lr", "1"]
    assert title(CommandTemplate(parts=parts), StudyConfig(), Secrets()) == "python -c 'import x x.train()' --lr 1"
    assert len(title(CommandTemplate(parts=["python", "x" * 1000]), StudyConfig(), Secrets())) == 300


@pytest.mark.parametrize(
    ("command", "starter", "asked"),
    [
        ("torchrun --nproc_per_node=2 train.py --num_processes 9", "torchrun", 2),
        ("torchrun --standalone --nproc-per-node 4 train.py", "torchrun", 4),
        ("torchrun --nproc_per_node=gpu train.py", "torchrun", None),
        ("torchrun --nnodes 2 --nproc_per_node=4 train.py", "torchrun", None),
        ("torchrun --nnodes=1:1 --nproc_per_node=4 -m pkg.train", "torchrun", 4),
        ("torchrun train.py", "torchrun", None),
        ("accelerate launch --cpu --num_processes 2 train.py", "accelerate", 2),
        ("env LR=1 python -m accelerate.commands.launch --num_processes=3 train.py", "accelerate-launch", 3),
        ("deepspeed --num_gpus 2 train.py --deepspeed", "deepspeed", 2),
        ("python train.py --nproc_per_node 4", "", None),
    ],
)
def test_number_of_processes_is_read_from_the_options_of_a_starter(command: str, starter: str, asked: int | None) -> None:
    found = program_of(command.split())
    assert (found.starter, found.num_processes) == (starter, asked)
