"""How often metrics are read: set in loops of libraries, passed to recipes, and left alone in a program's own loop.

tests/programs tests real Trainers of transformers and Lightning.
"""

import gc
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.harness import adapters
from autotune.harness.knobs.metrics import NEVER, MetricKnobs
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from tests.harness.conftest import Trial
from tests.harness.contexts import context

KEY = "step.metrics_sync_interval"
TRANSFORMERS = adapters.METRIC_READERS["transformers.trainer"]
LIGHTNING = adapters.METRIC_READERS["lightning.pytorch.trainer.trainer"]
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
    assert set(steps) == {step for step in range(1, 12) if step % told == 0}  # eleven steps per epoch


def test_training_loop_of_the_program_itself_is_left_alone(trial: Trial) -> None:
    found = trial("basic.py", knobs={KEY: 5}, mode="inspect").result()
    assert found.knobs[KEY].status == NOT_APPLICABLE
    assert "{step.metrics_sync_interval=10}" in found.knobs[KEY].reason == found.applicability[KEY]


def test_recipe_that_accumulates_gradients_reads_its_loss_as_often_as_asked(trial: Trial) -> None:
    asked = {"knobs": {"step.accumulation": 4}, "passed": {KEY: 5}}
    run = trial(TABULAR, *TABLE, "--print-every", "5", **asked, mode="parity", seed=1, max_steps=20)
    assert (run.result().knobs[KEY].status, run.result().observed[KEY]) == (APPLIED, 5)


def watching(knobs: dict[str, Any], passed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[MetricKnobs, Any]:
    """Returns a watch that neither waits for libraries nor counts tensors, and its context."""
    monkeypatch.setattr(adapters, "METRIC_READERS", {})
    session = context(knobs, spec={"passed": passed}, gradients=SimpleNamespace(every=1, gathered=0))
    return MetricKnobs(session), session


@pytest.mark.parametrize(
    ("read_at", "asked", "observed"),
    [
        ([1, 4, 7, 10, 12, 15, 18, 21, 23], 3, 3),  # eleven steps per epoch; each epoch counts from zero
        ([10, 20, 27, 37], 10, 10),  # an additional reading at the epoch's end
        (range(1, 40), 3, 1),
        ([10, 20, 30], 100, 10),
        ([10], 10, None),
    ],
)
def test_observed_interval_is_the_largest_gap_between_readings_of_a_loop(
    read_at: Iterable[int], asked: int, observed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, session = watching({}, {KEY: asked}, monkeypatch)
    for session.num_steps in read_at:
        watch._read()
    assert watch.observe().get(KEY) == observed


class Trainer(SimpleNamespace):
    """A trainer that allows weak references."""


def of_transformers(**changed: Any) -> Any:
    given = {"logging_nan_inf_filter": True, "logging_strategy": "steps", "logging_steps": 500, **changed}
    return Trainer(args=SimpleNamespace(**given))


def test_trainer_that_reads_losses_only_for_the_nan_filter_stops_reading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watching({KEY: 100}, {}, monkeypatch)
    trainer = of_transformers(logging_strategy="epoch")
    watch._meet(trainer, TRANSFORMERS)
    assert (watch.verify()[KEY].status, trainer.args.logging_nan_inf_filter) == (APPLIED, False)


def test_interval_is_not_applicable_to_a_trainer_that_reads_no_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watching({KEY: 100}, {}, monkeypatch)
    trainer = of_transformers(logging_strategy="epoch", logging_nan_inf_filter=False)
    watch._meet(trainer, TRANSFORMERS)
    assert (watch.verify()[KEY].status, watch.verify()[KEY].reason) == (NOT_APPLICABLE, NEVER)


def test_deleted_trainer_is_reported_with_its_last_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watching({}, {}, monkeypatch)
    watch._meet(of_transformers(logging_nan_inf_filter=False), TRANSFORMERS)
    gc.collect()
    assert (watch.observe(), watch.applicability()) == ({KEY: 500}, {})


def test_progress_bar_that_reads_every_batch_is_given_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watching({}, {}, monkeypatch)
    trainer = Trainer(progress_bar_callback=RichProgressBar(), loggers=[1], log_every_n_steps=50)
    watch._meet(trainer, LIGHTNING)
    assert "RichProgressBar" in watch.applicability()[KEY]
    assert watch.observe() == {KEY: 1}


@pytest.mark.parametrize(
    ("changed", "own", "asked", "after"),
    [
        ({}, 1, 100, 500),  # the filter reads the loss of every step
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
    reader, trainer = TRANSFORMERS, of_transformers(**changed)
    assert reader.interval(trainer) == own
    reader.seldom(trainer, asked)
    assert reader.interval(trainer) == after


class TQDMProgressBar:
    _refresh_rate, is_enabled = 1, True
    refresh_rate = property(lambda self: self._refresh_rate)


class RichProgressBar:
    refresh_rate, is_enabled = 100, True  # 100 per second


@pytest.mark.parametrize(
    ("bar", "loggers", "own", "after"),
    [
        (TQDMProgressBar(), [1], 1, 100),
        (TQDMProgressBar(), [], 1, 100),
        (None, [1], 50, 100),
        (None, [], None, None),
        (RichProgressBar(), [1], 1, 1),  # this bar cannot be made to read less often
    ],
)
def test_lightning_trainer_reads_metrics_for_its_log_and_its_progress_bar(
    bar: Any, loggers: list[int], own: int | None, after: int | None
) -> None:
    reader = LIGHTNING
    trainer = SimpleNamespace(progress_bar_callback=bar, loggers=loggers, log_every_n_steps=50)
    assert reader.interval(trainer) == own
    reader.seldom(trainer, 100)
    assert reader.interval(trainer) == after
