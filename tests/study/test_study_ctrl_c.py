"""Ctrl-C in a study with real processes: the launcher, the harness and a small program."""

import json
import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(4096, 64))
for epoch in range(100000):
    for (batch,) in DataLoader(data, batch_size=32):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
"""

STUDY = """
import sys
from pathlib import Path
from autotune.config.compose import compose
from autotune.launchers.local import LocalLauncher
from autotune.machine import host_facts
from autotune.studies import create
from autotune.study import Listener, StudyInputs, run_study

QUICK = ["measure.screening.warmup_min_device_s=0.1", "measure.screening.min_s=0.2", "measure.screening.warmup_max_s=3"]
QUICK.append("measure.quiet=false")  # regardless of other load on the machine

class Lines(Listener):
    def trial_ended(self, trial):
        print("ended", trial.number, trial.outcome, trial.reason, flush=True)

    def trial_started(self, number, kind, knobs, why):
        print("started", number, flush=True)

    def notice(self, message):
        print("notice", message, flush=True)

facts = host_facts()
composed = compose(["device.kind=cpu", *QUICK], command=[sys.executable, str(Path("train.py").resolve())], facts=facts)
plan = StudyInputs(
            title=composed.title, config=composed.config, yaml=composed.yaml, space=composed.space, command=composed.command,
            launcher=LocalLauncher(), machine=facts)
summary = run_study(plan, create(Path("runs"), "s"), Lines())
print("status", summary["status"], flush=True)
"""


@pytest.mark.thorough
def test_second_ctrl_c_keeps_the_measurements_and_leaves_no_process(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    lines = []
    with subprocess.Popen(
        [sys.executable, "-c", STUDY], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as process:  # fmt: skip
        for line in process.stdout:
            lines.append(line.strip())
            if line.strip() == "started 1" or "Ctrl-C again" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 0, "\n".join(lines)
    assert lines[-1] == "status interrupted"
    trials = json.loads((tmp_path / "runs" / "s" / "summary.json").read_text())["trials"]
    assert [trial["number"] for trial in trials] == [0, 1]
    assert trials[0]["outcome"] in ("ok", "unsteady")
    assert trials[1]["outcome"] == "interrupted"
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "train.py")], capture_output=True, text=True, check=False).stdout
    assert left == ""
