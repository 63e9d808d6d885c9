"""The pass "lines" counts what belongs to the training: no evaluations, no other loaders, and samples instead of items."""

from __future__ import annotations

import collections
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune.harness.clock import Finished
from autotune.harness.explain import compiling
from autotune.harness.explain.base import mean_step_s
from autotune.harness.explain.compiling import Compilations
from autotune.harness.explain.documents import HANDOVER, INPUT, ITEM, OPTIMIZER, OTHER, Lines
from autotune.harness.explain.lines import LinesPass
from autotune.harness.explain.phase_marks import DevicePhases
from autotune.harness.explain.sources import Sources
from autotune.harness.window import Window
from tests.harness.contexts import context
from tests.harness.test_clock import Device

BATCH = 8


def a_loader(**more: Any) -> Any:
    """Returns a stand-in for the training loader."""
    totals = {"total_wait_s": 0.0, "total_batches": 0.0, "total_samples": 0.0}
    facts = {"number": 0, "num_workers": 0, "batch_size": BATCH, "rows": None, "is_stream": False, "steps_per_epoch": 0}
    return SimpleNamespace(**{**facts, **totals, **more})


class Observed:
    """The pass "lines" over steps that a test makes up."""

    def __init__(self, folder: Path) -> None:
        self.is_training, self._is_over = True, False
        self.loaders = SimpleNamespace(training=a_loader(), unit="samples", unit_source="loader")
        self.loaders.is_training_now = lambda: self.is_training
        self.loaders.num_workers = lambda: self.loaders.training.num_workers
        self.modules = SimpleNamespace(num_graphs=lambda: 0, is_in_evaluation=False)
        self._context = context(
            device="cpu",
            rank=0,
            modules=self.modules,
            loaders=self.loaders,
            window=SimpleNamespace(steps={"samples": []}, plain_s=[]),
            communication=SimpleNamespace(is_looking=False, summary=dict),
            spec={"max_s": None, "folder": str(folder)},
        )
        self.lines = LinesPass(self._context)

    def begin(self, **loader: Any) -> None:
        self.loaders.training = a_loader(**loader)
        self.lines.begin()

    def step(self, *, is_evaluated: bool = False) -> None:
        """Ends a step."""
        before = self.lines._marks.enter(OPTIMIZER)
        self._context.num_steps += 1
        self._context.window.steps["samples"].append(float(BATCH))
        if is_evaluated:
            self.lines.leave_out(float(BATCH), 0.0)
        self.lines._marks.leave(before)

    def finish(self) -> Lines:
        self._is_over = True
        found = self.lines.finish()
        assert found is not None
        return found

    def close(self) -> None:
        if not self._is_over and hasattr(self.lines, "_marks"):
            self.lines.finish()


@pytest.fixture
def observed(tmp_path: Path) -> Iterator[Observed]:
    made = Observed(tmp_path)
    yield made
    made.close()


# --- evaluations ---


def test_garbage_collections_in_an_evaluation_do_not_count(observed: Observed) -> None:
    gc.disable()
    try:
        observed.begin()
        observed.step()
        gc.collect()
        observed.step()
        gc.collect()
        observed.step(is_evaluated=True)
        observed.step()
        found = observed.finish()
    finally:
        gc.enable()
    assert (found.steps, found.gc_count) == (3, pytest.approx(1 / 3))


def metric(seconds: float, name: str) -> Any:
    """Returns what torch records of a recompilation."""
    return SimpleNamespace(
        duration_us=1e6 * seconds, recompile_reason="size", co_filename=__file__, co_firstlineno=1, co_name=name
    )


def test_compiling_for_an_evaluation_does_not_count(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = [metric(9.0, "before")]
    monkeypatch.setattr(compiling, "_metrics", lambda: list(metrics))
    observed.begin()
    observed.step()
    metrics.append(metric(1.0, "train"))
    observed.step()
    metrics.append(metric(20.0, "evaluate"))
    observed.step(is_evaluated=True)
    found = observed.finish().compiled
    assert found is not None
    assert found.seconds == 1.0
    assert {row["function"] for row in found.recompilations} == {"before", "train"}


@pytest.mark.parametrize("reason", ["cache_size_limit reached", "recompile_limit reached", "Dynamo recompile limit exceeded"])
def test_a_reached_recompile_limit_is_reported_in_the_words_of_each_torch(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compiling, "_metrics", lambda: [metric(1.0, "a")])
    monkeypatch.setitem(counters, "unimplemented", collections.Counter())
    found = Compilations().result(Sources())
    monkeypatch.setitem(counters, "unimplemented", collections.Counter([reason]))
    now = Compilations().result(Sources())
    assert found is not None
    assert now is not None
    assert (found.is_limit_hit, now.is_limit_hit) == (False, True)


def test_compile_seconds_are_right_although_torch_forgets_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = collections.deque([metric(5.0, "a"), metric(5.0, "b")], maxlen=2)
    monkeypatch.setattr(compiling, "_metrics", lambda: list(metrics))
    compilations = Compilations()
    metrics.append(metric(1.0, "c"))
    found = compilations.result(Sources())
    assert found is not None
    assert found.seconds == 1.0


def test_copies_in_an_evaluation_are_not_sites(observed: Observed) -> None:
    observed.begin()
    torch.ones(1).to("meta")
    observed.modules.is_in_evaluation = True
    torch.ones(1).to("meta")
    observed.step()
    (site,) = observed.finish().syncs
    assert (site.kind, site.count) == ("copy", 1.0)


def test_device_time_counts_again_from_the_end_of_an_evaluation(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next epoch starts new workers in the same phase "input"; without their time, the GPU seemed to wait for the host."""
    observed.begin()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cuda", Device())
        marks, phases = observed.lines._marks, DevicePhases()
        observed.lines._device, marks.on_change = phases, phases.note
        phases.note(OTHER)
        marks.enter(INPUT)
        observed.lines.leave_out(0.0, 0.0)
        marks.leave(OTHER)
        input_s = phases.seconds()[INPUT]
        observed.lines._device = marks.on_change = None
    assert input_s == pytest.approx(0.01)


def test_mean_step_before_a_pass_excludes_evaluations_and_compilations() -> None:
    def step(step_s: float, *, is_foreign: bool = False, is_quiet: bool = True) -> Finished:
        return Finished(1.0, step_s, step_s, 8.0, 0.0, is_foreign, is_quiet)

    facts = {"explained": object(), "last_step": SimpleNamespace(is_announced=False)}
    window = Window(context(device="cpu", loaders=SimpleNamespace(unit_source="loader"), spec={"mode": "explain"}, **facts))
    window.meter = SimpleNamespace(phase="steady")  # type: ignore[assignment]
    window.feed([step(30.0, is_quiet=False), step(0.1), step(5.0, is_foreign=True), step(0.3)])
    assert mean_step_s(window.plain_s) == pytest.approx(0.2)
    assert mean_step_s([]) is None


# --- loaders ---


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)  # so long that each batch is timed
        return torch.ones(1)


class Other(Slow):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


def test_only_the_stages_of_the_training_loader_are_timed(observed: Observed) -> None:
    observed.begin()
    list(DataLoader(Slow(), batch_size=2))
    observed.is_training = False
    list(DataLoader(Other(), batch_size=2))
    observed.step()
    item = next(stage for stage in observed.finish().stages if stage.name == ITEM)
    assert (item.count, item.function) == (2, "Slow.__getitem__")


@pytest.mark.parametrize("facts", [{}, {"batch_size": 1, "rows": BATCH}])
def test_receiving_batches_is_timed_per_sample_even_if_no_worker_has_reported(
    observed: Observed, facts: dict[str, Any]
) -> None:
    observed.begin(num_workers=2, **facts)
    observed.lines._stages.totals = {HANDOVER: [0.8, 0.4, 0.0, 0.0, 10.0]}
    observed.loaders.training.total_batches += 10
    observed.step()
    (stage,) = observed.finish().stages
    assert (stage.name, stage.seconds, stage.cpu_s) == (HANDOVER, pytest.approx(0.01), pytest.approx(0.005))


@pytest.mark.parametrize("facts", [{"batch_size": None, "total_samples": 320.0, "total_batches": 10.0}, {"rows": 32}])
def test_stages_are_timed_per_sample_if_an_item_is_a_whole_batch(observed: Observed, facts: dict[str, Any]) -> None:
    observed.begin(**{"batch_size": 1, **facts})
    stages = observed.lines._stages
    stages.num_fetches = stages.num_samples = stages.num_timed = 10
    stages.totals = {ITEM: [6.4, 3.2, 0.0, 0.0, 10.0]}
    observed.step()
    found = observed.finish()
    (stage,) = found.stages
    assert (stage.seconds, stage.cpu_s) == (pytest.approx(0.02), pytest.approx(0.01))
    assert found.batch_size == facts.get("rows")


def test_stages_stay_per_sample_with_a_batch_sampler_that_has_no_batch_size(observed: Observed) -> None:
    observed.begin(batch_size=None, total_samples=320.0, total_batches=10.0)
    stages = observed.lines._stages
    stages.num_fetches, stages.num_samples, stages.num_timed = 10, 640, 640
    stages.totals = {ITEM: [6.4, 3.2, 0.0, 0.0, 640.0]}
    observed.step()
    (stage,) = observed.finish().stages
    assert stage.seconds == pytest.approx(0.01)


def test_ranks_that_train_on_the_same_batch_are_reported(observed: Observed) -> None:
    observed.begin()
    observed._context.sharing.ranks_per_batch = lambda: 2
    observed.step()
    found = observed.finish()
    assert (found.ranks_per_batch, found.unit_source) == (2, "loader")


def test_wait_is_that_of_all_loaders_if_another_loader_trains_now(observed: Observed) -> None:
    observed.begin(total_wait_s=50.0)
    observed.lines._marks.leave(observed.lines._marks.enter(INPUT))
    observed.step()
    observed.loaders.training = a_loader(total_wait_s=10.0)
    found = observed.finish()
    assert found.wait_s == found.phases_s[INPUT] > 0


def test_waits_of_a_thread_that_fetches_ahead_are_not_the_steps(observed: Observed) -> None:
    observed.begin()
    observed.loaders.training.total_wait_s += 5.0
    observed.step()
    assert observed.finish().wait_s == 0.0
