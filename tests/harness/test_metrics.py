"""How often metrics are read: set in loops of libraries, and left alone in a program's own loop.

tests/programs tests real Trainers of transformers and Lightning.
"""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.harness import adapters
from autotune.harness.knobs.metrics import NEVER, MetricKnobs
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE
from tests.harness.conftest import Trial
from tests.harness.contexts import context

KEY = "step.metrics_sync_interval"
TRANSFORMERS = adapters.METRIC_READERS["transformers.trainer"]
LIGHTNING = adapters.METRIC_READERS["lightning.pytorch.trainer.trainer"]


def test_training_loop_of_the_program_itself_is_left_alone(trial: Trial) -> None:
    found = trial("basic.py", knobs={KEY: 5}, mode="inspect").result()
    assert found.knobs[KEY].status == NOT_APPLICABLE
    assert "{step.metrics_sync_interval=10}" in found.knobs[KEY].reason == found.applicability[KEY]


def watching(knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> MetricKnobs:
    """Returns a watch that does not wait for libraries."""
    monkeypatch.setattr(adapters, "METRIC_READERS", {})
    return MetricKnobs(context(knobs))


class Trainer(SimpleNamespace):
    """A trainer that allows weak references."""


def of_transformers(**changed: Any) -> Any:
    given = {"logging_nan_inf_filter": True, "logging_strategy": "steps", "logging_steps": 500, **changed}
    return Trainer(args=SimpleNamespace(**given))


def test_trainer_that_reads_losses_only_for_the_nan_filter_stops_reading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watching({KEY: 100}, monkeypatch)
    trainer = of_transformers(logging_strategy="epoch")
    watch._meet(trainer, TRANSFORMERS)
    assert (watch.verify()[KEY].status, trainer.args.logging_nan_inf_filter) == (APPLIED, False)


def test_interval_is_not_applicable_to_a_trainer_that_reads_no_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watching({KEY: 100}, monkeypatch)
    trainer = of_transformers(logging_strategy="epoch", logging_nan_inf_filter=False)
    watch._meet(trainer, TRANSFORMERS)
    assert (watch.verify()[KEY].status, watch.verify()[KEY].reason) == (NOT_APPLICABLE, NEVER)


def test_deleted_trainer_is_reported_with_its_last_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watching({}, monkeypatch)
    watch._meet(of_transformers(logging_nan_inf_filter=False), TRANSFORMERS)
    gc.collect()
    assert (watch.observe(), watch.applicability()) == ({KEY: 500}, {})


def test_progress_bar_that_reads_every_batch_is_given_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watching({}, monkeypatch)
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
