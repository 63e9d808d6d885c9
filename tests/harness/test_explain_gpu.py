"""What the passes of mode "explain" do on a GPU, with fakes of the profiler and of the current device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from autotune.harness.explain import products, trace
from autotune.harness.explain.lines import samples_of
from autotune.harness.explain.peaks import narrow_type, untouched
from autotune.harness.explain.trace import MAX_S, MIN_STEPS, TracePass
from tests.harness.contexts import context

STEP_S, START_S, STOP_S = 0.1, 2.0, 7.0


class Profiler:
    """A fake of torch.profiler.profile, on a simulated clock: it takes long to start and to stop."""

    now_s = 0.0
    teardown: ClassVar[list[str | None]] = []  # what kineto would read in the environment at each start
    profiler = SimpleNamespace(kineto_results=None)

    def __init__(self, **_: Any) -> None:
        self.step_num = 0

    def start(self) -> None:
        Profiler.teardown.append(os.environ.get("TEARDOWN_CUPTI"))
        Profiler.now_s += START_S

    def step(self) -> None:
        self.step_num += 1

    def stop(self) -> None:
        Profiler.now_s += STOP_S


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> TracePass:
    """A pass "trace" on the second GPU that has traced its first step, and the next one has begun."""
    monkeypatch.setattr(Profiler, "now_s", 0.0)
    monkeypatch.setattr(Profiler, "teardown", [])
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter=lambda: Profiler.now_s))
    monkeypatch.setattr(TracePass, "_exported", lambda _: "")
    monkeypatch.setattr(trace, "peaks", lambda *_: {})
    made = TracePass(context(device_index=1, rank=0))
    made._marks = made._syncs = SimpleNamespace(between_steps=None, uninstall=lambda: None)  # type: ignore[assignment]
    made._start()
    Profiler.now_s += STEP_S
    made._next()
    return made


@pytest.fixture
def traced(began: TracePass) -> TracePass:
    """A pass that has traced as many steps as it wants."""
    while not began.is_over:
        Profiler.now_s += STEP_S
        began._next()
    return began


def test_cupti_is_not_torn_down_between_two_traces(traced: TracePass) -> None:
    assert Profiler.teardown == ["0", "0"]


def test_time_of_profiled_steps_excludes_the_stop_of_the_profiler(traced: TracePass) -> None:
    assert traced._num_steps == MIN_STEPS
    assert traced._seconds == pytest.approx(MIN_STEPS * STEP_S)


def test_whole_step_is_left_out_if_an_epoch_began_in_it_after_an_evaluation(began: TracePass) -> None:
    while not began.is_over:
        if began._num_steps % 2 == 0:
            Profiler.now_s += 1.0  # the evaluation
            began.leave_out(0.0, 0.0)
        Profiler.now_s += STEP_S
        began._next()
    found = began.finish()
    assert found is not None
    assert (found.steps, found.left_out) == (MIN_STEPS, list(range(0, 2 * MIN_STEPS, 2)))
    assert found.step_s == pytest.approx(STEP_S)


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_step_in_which_the_program_ends_is_left_out(began: TracePass, is_evaluated: bool) -> None:
    Profiler.now_s += STEP_S
    began._next()
    Profiler.now_s += 30.0  # a last evaluation
    if is_evaluated:
        began.leave_out(0.0, 0.0)
    found = began.finish()
    assert found is not None
    assert (found.steps, found.left_out) == (1, [1])
    assert found.step_s == pytest.approx(STEP_S)


def test_tracing_goes_on_until_a_step_without_an_evaluation(began: TracePass) -> None:
    for is_evaluated in (True, False):
        assert not began.is_over
        Profiler.now_s += 2 * MAX_S if is_evaluated else STEP_S
        if is_evaluated:
            began.leave_out(0.0, 0.0)
        began._next()
    found = began.finish()
    assert found is not None
    assert (found.steps, found.left_out) == (1, [0])
    assert found.step_s == pytest.approx(STEP_S)


def test_nothing_is_found_if_the_only_traced_step_has_an_evaluation(began: TracePass) -> None:
    Profiler.now_s += STEP_S
    began.leave_out(0.0, 0.0)
    began._next()
    assert began.finish() is None


def test_last_step_counts_if_the_program_ends_right_after_it(began: TracePass) -> None:
    Profiler.now_s += STEP_S
    began._marks.between_steps = began._next
    found = began.finish()
    assert found is not None
    assert (found.steps, found.left_out) == (1, [])
    assert found.step_s == pytest.approx(STEP_S)


@pytest.mark.parametrize("is_announced", [False, True])
def test_peaks_are_measured_in_a_rank_that_rank_0_ends(
    began: TracePass, monkeypatch: pytest.MonkeyPatch, is_announced: bool
) -> None:
    monkeypatch.setattr(trace, "peaks", lambda *_: {"bytes": 1.0})
    began.context.last_step = SimpleNamespace(is_announced=is_announced)  # type: ignore[assignment]
    Profiler.now_s += STEP_S
    began._marks.between_steps = began._next
    found = began.finish()
    assert found is not None
    assert found.peaks == ({"bytes": 1.0} if is_announced else {})


def test_samples_of_steps_that_the_gpu_has_not_finished_are_estimated() -> None:
    assert samples_of([32.0] * 12, 20) == pytest.approx(640.0)
    assert samples_of([30.0, 31.0, 33.0], 3) == 94.0
    assert samples_of([], 3) == 0.0


def test_peaks_and_products_are_measured_on_the_gpu_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def current(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    with untouched("cuda", 1):
        assert not torch.is_grad_enabled()
    with untouched("cpu"):
        assert entered == [1]


@pytest.mark.parametrize(("capability", "name"), [((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_products_are_timed_in_the_16_bit_type_that_the_gpu_multiplies_fast(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    """A V100 or T4 only emulates bfloat16: its products would seem slower in 16 bits than in 32."""
    timed: list[Any] = []

    def least_s(call: Any, _: str) -> float:
        timed.append(call().dtype if call.func is torch.mm else None)
        return 1.0

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(products, "least_s", least_s)
    assert narrow_type("cuda") == name
    assert narrow_type("cpu") == "bfloat16"
    matrix = torch.ones(2, 2)
    products._timed(torch.mm, [matrix, matrix], getattr(torch, narrow_type("cuda")), "cuda")
    assert timed == [torch.float32, getattr(torch, name), None]  # the third is the conversion
