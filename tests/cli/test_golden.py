"""Compares the complete output at several widths, and in a pipe, with the files in tests/cli/golden.

    GOLDEN=write python -m pytest tests/cli/test_golden.py

writes these files again. Look at them before you commit them.
"""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from autotune.cli import inspect
from autotune.cli.live import LiveView
from autotune.cli.main import main
from autotune.cli.plain import PlainLines
from autotune.cli.terminal import PIPE_WIDTH, THEME
from autotune.config.compose import compose
from autotune.harness.protocol import Progress, RankResult
from autotune.records import Kind
from autotune.trials.events import Outlook
from tests.support.studies import make_study

GOLDEN = Path(__file__).with_name("golden")
SCREENS = {
    "show": ["show", "resnet18"],
    "trial": ["show", "resnet18", "--trial", "5"],
    "list": ["list"],
    "help": ["--help"],
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


WIDTHS = pytest.mark.parametrize("width", [60, 80, 120, 200, None])  # None: a pipe


def compare(name: str, width: int | None, text: str) -> None:
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text)
    said = "\n".join(line.rstrip() for line in plain.splitlines()) + "\n"
    file = GOLDEN / f"{name}-{width or 'pipe'}.txt"
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(said, encoding="utf-8")
    assert said == file.read_text(encoding="utf-8")
    assert "…" not in said or name in ("help", "run")  # the CLI library shortens help, the live footer its lines
    if width:
        assert max(map(len, said.splitlines())) <= width


@pytest.mark.usefixtures("utc")
@WIDTHS
@pytest.mark.parametrize("name", SCREENS)
def test_screens_match_the_golden_files(name, width, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable, value in {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width or "")}.items():
        monkeypatch.setenv(variable, value)
    if width is None:
        monkeypatch.delenv("COLUMNS")
    for study in ("resnet18", "transformer-with-a-long-name"):
        make_study(Path("runs"), study)
    out = Terminal() if width else io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(list(SCREENS[name])) == 0
    compare(name, width, out.getvalue())


PLAN = Outlook(left_s=400.0, search_s=232.0, num_trials=24, trial_s=8.0)


@WIDTHS
def test_output_of_a_run_from_plan_to_verdict_matches_the_golden_file(width, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder, out, now_s = make_study(Path("runs")), io.StringIO(), [1000.0]
    console = Console(file=out, width=width or PIPE_WIDTH, color_system=None, theme=THEME)
    view = LiveView(console, folder.path, clock=lambda: now_s[0]) if width else PlainLines(folder.path)
    study = folder.read_study()
    view.started(study)
    view.started(study)
    for trial in folder.read_trials():
        if trial.number == 1:
            view.planned(PLAN)
        view.trial_started(trial.number, trial.kind, trial.changed, trial.why)
        if width and trial.number == 5:
            now_s[0] += 190.0
            view.progress(Progress(time_s=1.0, phase="steady", step=42, rate_per_s=39.12))
            console.print(view.footer())
        view.trial_ended(trial)
        if trial.number == 6:
            view.notice("The search is over: the search's part of the budget is used.")
            view.finals_started([0, 5, 6], 168.0)
    view.attribution_started(5, ["precision.amp", "layout.channels_last"], 90.0)
    view.trial_started(9, Kind.attribution, {"precision.amp": "bf16"}, "trial 5 without layout.channels_last")
    view.finished(folder.read_summary())
    compare("run", width, out.getvalue() or capsys.readouterr().out)


@WIDTHS
def test_output_of_inspect_matches_the_golden_file(width, monkeypatch):
    out = io.StringIO()
    console = Console(file=out, width=width or PIPE_WIDTH, color_system=None, theme=THEME)
    monkeypatch.setattr(inspect, "console", lambda: console)
    seen = RankResult(trial=0, nonce="n", rank=0, world_size=1, pid=1, status="measured", **INSPECTED)
    inspect._print(seen, ROWS, ["python", "train.py", "--data", "photos"], compose([], command=["python", "-c", "pass"]))
    compare("inspect", width, out.getvalue())


INSPECTED = {
    "detected": {
        "num_steps": 5,
        "loader": {
            "site": "train.py:31",
            "dataset": "torchvision.datasets.folder.ImageFolder",
            "num_samples": 1281167,
            "loader.batch_size": 32,
            "loader.num_workers": 0,
            "loader.pin_memory": False,
        },
        "modules": ["ResNet"],
        "num_parameters": [11689512],
        "optimizers": ["SGD"],
        "precision": {"autocast": "off", "parameters": ["fp32"]},
        "compile": "off",
        "world_size": 1,
        "device": "cpu",
        "unit": "samples",
        "unit_source": "loader",
    },
    "facts": {"torch": "2.14.1", "python": "3.12.3", "executable": "/opt/venv/bin/python", "threads": 8},
    "memory": {"kind": "cpu", "peak_bytes": 3_200_000_000},
}
ROWS = [
    {"knob": "loader.batch_size", "value": 32, "can_be_turned": True, "reason": "", "values": [16, 32, 64, 128, 256]},
    {"knob": "loader.num_workers", "value": 0, "can_be_turned": True, "reason": "", "values": [0, 1, 2, 4, 6, 8]},
    {"knob": "loader.own_cores", "value": None, "can_be_turned": True, "reason": inspect.ASKED, "values": []},
    {"knob": "precision.amp", "value": "off", "can_be_turned": True, "reason": "", "values": ["off", "bf16"]},
    *(
        {"knob": knob, "value": None, "can_be_turned": False, "reason": "no CUDA device: it has no effect", "values": []}
        for knob in ("loader.pin_memory", "loader.non_blocking", "memory.allocator", "memory.fraction")
    ),
    {
        "knob": "backend.sdpa",
        "value": "default",
        "can_be_turned": False,
        "reason": "no fused scaled_dot_product_attention was seen in the backward pass",
        "values": [],
    },
]
