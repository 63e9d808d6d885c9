"""`autotune inspect` on a real program."""

import json
import shlex
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until

PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
loader = DataLoader(data, batch_size=16)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1_000_000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


@pytest.fixture
def program(cli) -> list[str]:
    (cli.cwd / "train.py").write_text(PROGRAM, encoding="utf-8")
    return [sys.executable, "train.py"]


def test_loader_optimizer_and_knobs_are_named_with_reasons(cli, program):
    ended = cli("inspect", "--", *program)
    assert ended.returncode == 0, ended.stderr
    told = " ".join(ended.stdout.split())
    for words in (
        "Linear (36 parameters)",
        "fp32 parameters, no autocast, not compiled",
        "SGD",
        "TensorDataset of 64 samples, batch 16, workers 0, made at train.py:7",
        "16 samples, from the loader's batches; about",
        "loader.batch_size 16 8, 16, 32",
        "cannot be changed",
        "nccl.*",
        "layout.channels_last (false): no module that trains has convolution weights",
    ):
        assert words in told, words


@pytest.mark.thorough
def test_json_reports_values_placeholders_pins_and_unavailable_knobs(cli, program):
    source = PROGRAM.replace("batch_size=16", "batch_size=int(__import__('sys').argv[1])")
    (cli.cwd / "train.py").write_text(source, encoding="utf-8")
    ended = cli("inspect", "--json", "loader.num_workers=0", "--", *program, "{loader.batch_size=8}")
    knobs = {row["knob"]: row for row in json.loads(ended.stdout)["knobs"]}
    assert knobs["loader.batch_size"]["values"][:3] == [4, 8, 16]
    assert "placeholder" in knobs["loader.batch_size"]["reason"]
    assert knobs["loader.num_workers"]["reason"] == "pinned at 0"
    assert (knobs["loader.batch_size"]["value"], knobs["loader.batch_size"]["can_be_turned"]) == (8, True)
    assert not knobs["layout.channels_last"]["can_be_turned"]
    assert "convolution" in knobs["layout.channels_last"]["reason"]


@pytest.mark.thorough
def test_inspect_and_run_treat_a_global_batch_and_a_pinned_knob_alike(cli, program):
    own_workers = PROGRAM.replace("batch_size=16", "batch_size=16, num_workers=1")
    (cli.cwd / "train.py").write_text(own_workers, encoding="utf-8")
    words = ["train.global_batch=64", "loader.prefetch_factor=4"]
    looked = cli("inspect", "--json", *words, "--", *program)
    assert looked.returncode == 0, looked.stderr
    rows = {row["knob"]: row for row in json.loads(looked.stdout)["knobs"]}
    assert rows["loader.prefetch_factor"]["value"] == 4, "the pin takes effect, because the program has a worker"
    quick = ["study.budget.minutes=1", "study.budget.trials=1", "tracker.uri=none", "measure.quiet=false", "study.name=s"]
    ended = cli("run", *quick, *words, "--", *program)
    assert ended.returncode == 0, ended.stderr
    space = json.loads((cli.cwd / "runs/s/study.json").read_text())["space"]
    assert rows["loader.batch_size"]["values"] == space["loader.batch_size"]["choice"]
    baseline = json.loads((cli.cwd / "runs/s/trials/0000/trial.json").read_text())
    assert baseline["knob_reports"]["loader.prefetch_factor"]["status"] == "applied"


@pytest.mark.thorough
def test_inspect_reports_an_ignored_placeholder_and_files_that_the_program_wrote(cli, program):
    (cli.cwd / "train.py").write_text("open('log.txt', 'w').write('1234')\n" + PROGRAM, encoding="utf-8")
    ended = cli("inspect", "--", *program, "{loader.batch_size=8}")
    told = " ".join(ended.stdout.split())
    assert "doubt loader.batch_size: overridden by the program, the command line asks for 8, but the program uses 16" in told
    assert "not removed: log.txt (4 B)" in told


UNSEEN_STEPS = """
import torch
from torch.utils.data import DataLoader

weight = torch.randn(8, 4, requires_grad=True)
while True:
    for x in DataLoader(torch.randn(64, 8), batch_size=16):
        (x @ weight).square().mean().backward()
        weight = (weight - 0.1 * weight.grad).detach().requires_grad_()
"""


@pytest.mark.parametrize(
    "words", [("inspect",), pytest.param(("run", "study.budget.minutes=1", "tracker.uri=none"), marks=pytest.mark.thorough)]
)
def test_program_without_visible_steps_exits_with_3_and_advice(cli, program, words):
    (cli.cwd / "train.py").write_text(UNSEEN_STEPS, encoding="utf-8")
    ended = cli(*words, "--", *program)
    assert ended.returncode == 3
    told = " ".join(ended.stderr.split())
    assert "in 64 backward passes, the program has made no optimizer of torch.optim" in told
    assert "seen: a DataLoader made at train.py:7; 64 backward passes; no optimizer step" in told
    assert "autotune.trial_step(samples=len(batch))" in told
    assert "Traceback" not in ended.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_inspection_leaves_no_process_or_folder_and_reports_its_phase(cli, number):
    source = "import os, time, pathlib; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    (cli.cwd / "tmp").mkdir()
    cli.environment["TMPDIR"] = str(cli.cwd / "tmp")
    running = cli.start("inspect", "--", sys.executable, "-c", source)
    file = cli.cwd / "pid"
    pid = int(wait_until(lambda: file.is_file() and file.read_text()))
    running.send_signal(number)
    told, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert told.splitlines()[0] == "autotune: inspecting: starting"
    assert told.splitlines()[-1] == "autotune: the inspection was stopped, and its processes and temporary files are gone"
    assert not psutil.pid_exists(pid)
    assert list((cli.cwd / "tmp").glob("autotune-*")) == []


def test_program_that_does_not_train_exits_with_3_and_shows_its_last_output(cli):
    ended = cli("inspect", "--", sys.executable, "-c", "raise SystemExit('no data here')")
    assert ended.returncode == 3
    assert "no data here" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.thorough
def test_previous_content_of_an_overwritten_file_is_kept_and_named(cli, program):
    source = PROGRAM.replace("for _ in", "with open('best.pt', 'w') as file:\n    file.write('new')\nfor _ in")
    (cli.cwd / "train.py").write_text(source, encoding="utf-8")
    (cli.cwd / "best.pt").write_text("precious", encoding="utf-8")
    (cli.cwd / "epoch3").hardlink_to(cli.cwd / "best.pt")  # a file with two hard links cannot be guarded
    ended = cli("inspect", "--", *program)
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "overwritten" in line]
    assert str(cli.cwd / "best.pt") in line
    copy = Path(line.rpartition(" ")[2])
    assert copy.read_text(encoding="utf-8") == "precious"
    shutil.rmtree(copy.parent)


@pytest.mark.thorough
def test_overwritten_content_is_kept_when_the_inspection_is_stopped(cli):
    source = "import pathlib, time; pathlib.Path('best.pt').write_text('new'); pathlib.Path('done').touch(); time.sleep(600)"
    (cli.cwd / "tmp").mkdir()
    cli.environment["TMPDIR"] = str(cli.cwd / "tmp")
    (cli.cwd / "best.pt").write_text("precious", encoding="utf-8")
    (cli.cwd / "epoch3").hardlink_to(cli.cwd / "best.pt")  # a file with two hard links cannot be guarded
    running = cli.start("inspect", "--", sys.executable, "-c", source)
    wait_until((cli.cwd / "done").exists)
    running.send_signal(signal.SIGINT)
    told, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    (line,) = [line for line in told.splitlines() if "overwritten" in line]
    assert Path(line.rpartition(" ")[2]).read_text(encoding="utf-8") == "precious"


@pytest.mark.thorough
def test_program_that_reads_standard_input_gets_advice_that_works(cli, program):
    (cli.cwd / "train.py").write_text("name = input('name? ')\n" + PROGRAM, encoding="utf-8")
    ended = cli("inspect", "--", *program)
    assert ended.returncode == 3
    assert "EOFError: EOF when reading a line (a trial has no standard input." in ended.stderr
    (cli.cwd / "answers.txt").write_text("me\n", encoding="utf-8")
    advised = ended.stderr.partition("from a file: ")[2].partition(")")[0]
    words = shlex.split(advised.replace("python train.py", shlex.join(program)))
    assert cli("inspect", *words).returncode == 0


@pytest.mark.thorough
def test_program_that_needs_a_terminal_gets_advice_that_works(cli, program):
    source = "import os\n_, width = os.popen('stty size').read().split()\n"
    (cli.cwd / "train.py").write_text(source + PROGRAM, encoding="utf-8")
    ended = cli("inspect", "--", *program)
    assert ended.returncode == 3
    advised = ended.stderr.partition("Give the program one: -- ")[2].partition(")")[0]
    words = shlex.split(advised.replace("python train.py", shlex.join(program)))
    assert words[0] == "script"
    assert cli("inspect", "--", *words).returncode == 0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "print('usage: train.py DATA'); raise SystemExit(1)",
            "exit status 1: nothing on standard error; last on standard output: ",
        ),
        ("import torch; print('usage: train.py DATA')", "no optimizer step was seen"),
    ],
)
def test_output_of_a_program_that_ends_without_training_is_shown(cli, source, said):
    (cli.cwd / "train.py").write_text(source, encoding="utf-8")
    ended = cli("inspect", "--", sys.executable, "train.py")
    assert ended.returncode == 3
    assert said in ended.stderr
    assert "  | usage: train.py DATA\n" in ended.stderr
