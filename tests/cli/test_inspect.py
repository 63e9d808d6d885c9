"""`autotune inspect` on a real program."""

import json
import sys

import pytest

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
    for words in ("loader.batch_size 16", "SGD", "Linear", "train.py:7", "fp32", "loader.num_workers", "no: "):
        assert words in ended.stdout, words


def test_json_holds_values_and_reasons(cli, program):
    ended = cli("inspect", "--json", "--", *program)
    knobs = {row["knob"]: row for row in json.loads(ended.stdout)["knobs"]}
    assert knobs["loader.batch_size"]["value"] == 16
    assert knobs["loader.batch_size"]["can_be_turned"]
    assert not knobs["layout.channels_last"]["can_be_turned"]
    assert "convolution" in knobs["layout.channels_last"]["reason"]


def test_program_that_does_not_train_is_3_with_its_last_words(cli):
    ended = cli("inspect", "--", sys.executable, "-c", "raise SystemExit('no data here')")
    assert ended.returncode == 3
    assert "no data here" in ended.stderr
    assert "Traceback" not in ended.stderr
