"""How often metrics are read: by a library's loop, which is told, a recipe's, which is asked, a program's own, left alone.

Real Trainers of transformers and Lightning are in the matrix of programs.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.harness import adapters
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from tests.harness.conftest import Trial

KEY = "step.metrics_sync_interval"
TABLE = (
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--samples-per-epoch",
    "88",
    "--batch-size",
    "8",
    "--epochs",
    "99",
    "--device",
    "cpu",
)
TABULAR = str(Path(__file__).parents[2] / "autotune" / "programs" / "tabular.py")


@pytest.mark.parametrize(("asked", "told", "status"), [(3, 3, APPLIED), (3, 1, OVERRIDDEN)])
def test_a_recipe_reads_its_loss_as_often_as_asked(trial: Trial, asked: int, told: int, status: str) -> None:
    run = trial(TABULAR, *TABLE, "--print-every", str(told), passed={KEY: asked}, mode="parity", seed=1, max_steps=20)
    found = run.result()
    assert (found.knobs[KEY].status, found.observed[KEY]) == (status, told)
    assert KEY not in found.applicability
    steps = [int(line.split()[3]) for line in run.stdout.splitlines() if " loss " in line]
    assert set(steps) == {step for step in range(1, 12) if step % told == 0}  # eleven steps an epoch


def test_a_program_s_own_loop_is_left_alone(trial: Trial) -> None:
    found = trial("basic.py", knobs={KEY: 5}, mode="inspect").result()
    assert found.knobs[KEY].status == NOT_APPLICABLE
    assert "{step.metrics_sync_interval=10}" in found.knobs[KEY].reason == found.applicability[KEY]


def of_transformers(**changed: Any) -> Any:
    given = {"logging_nan_inf_filter": True, "logging_strategy": "steps", "logging_steps": 500, **changed}
    return SimpleNamespace(args=SimpleNamespace(**given))


@pytest.mark.parametrize(
    ("changed", "own", "asked", "after"),
    [
        ({}, 1, 100, 500),  # the filter looks at every step
        ({"logging_steps": 5}, 1, 100, 100),
        ({"logging_steps": 5, "logging_nan_inf_filter": False}, 5, 100, 100),
        ({"logging_steps": 5}, 1, 1, 1),
        ({"logging_strategy": "epoch", "logging_nan_inf_filter": False}, None, 100, None),
        ({"logging_steps": 0.1, "logging_nan_inf_filter": False}, None, 100, None),
    ],
)
def test_a_trainer_of_transformers_reads_no_more_often_than_asked(
    changed: dict[str, Any], own: int | None, asked: int, after: int | None
) -> None:
    reader, trainer = adapters.METRIC_READERS["transformers.trainer"], of_transformers(**changed)
    assert reader.interval(trainer) == own
    reader.seldom(trainer, asked)
    assert reader.interval(trainer) == after


class TQDMProgressBar:
    _refresh_rate, is_enabled = 1, True
    refresh_rate = property(lambda self: self._refresh_rate)


class RichProgressBar:
    refresh_rate, is_enabled = 100, True  # a second


@pytest.mark.parametrize(
    ("bar", "loggers", "own", "after"),
    [
        (TQDMProgressBar(), [1], 1, 100),
        (TQDMProgressBar(), [], 1, 100),
        (None, [1], 50, 100),
        (None, [], None, None),
        (RichProgressBar(), [1], 1, 1),  # overridden: it looks at every batch
    ],
)
def test_a_trainer_of_lightning_reads_for_its_log_and_for_its_bar(
    bar: Any, loggers: list[int], own: int | None, after: int | None
) -> None:
    reader = adapters.METRIC_READERS["lightning.pytorch.trainer.trainer"]
    trainer = SimpleNamespace(progress_bar_callback=bar, loggers=loggers, log_every_n_steps=50)
    assert reader.interval(trainer) == own
    reader.seldom(trainer, 100)
    assert reader.interval(trainer) == after
