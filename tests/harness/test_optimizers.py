"""What counts as a step, and how many samples a step holds."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.optim.optimizer import _device_dtype_check_for_fused

from autotune.harness.knobs.module import IN_FUNCTION
from autotune.harness.knobs.optimizer import KEY, OptimizerKnobs, _problem
from autotune.harness.optimizers import ADDED_TOGETHER, EVALUATIONS, Overflows
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, UNMEASURABLE
from autotune.harness.session import OTHER_DEVICE
from tests.harness.conftest import RULES, Trial
from tests.harness.contexts import context


@pytest.mark.parametrize(
    ("kind", "samples", "source"),
    [
        ("without_loader", 14, "forward calls"),
        ("last_in_closure", 14, "forward calls"),
        ("subclassed", 12, "loader"),
        ("some_without_batch", 12, "loader"),
        ("optimizer_in_backward", 12, "loader"),
        ("pair_after_one", 12, "loader"),
        ("in_parts", 12, "loader"),
        pytest.param("rebuilt_optimizer", 12, "loader", marks=pytest.mark.thorough),
    ],
)
def test_samples_of_a_step_are_counted_once(trial: Trial, kind: str, samples: int, source: str) -> None:
    found = trial("kinds.py", kind).result()
    assert found.status == "measured"
    assert (found.unit, found.unit_source) == ("samples", source)
    assert set(found.steps["samples"][3:]) - {65 * samples} == {samples}  # 65 steps pass before those of a new optimizer count


CALLS = ["acting", "acting critic", "acting direct", "tested", "tested closure", "solver", "solver gathered", "chunks"]


@pytest.mark.parametrize("words", CALLS)
def test_calls_that_bring_no_samples_to_train_on_are_not_counted(trial: Trial, words: str) -> None:
    passed = {"loader.batch_size": 14} if words == "chunks" else {}
    found = trial("kinds.py", *words.split(), passed=passed).result()
    assert (found.status, found.unit, found.unit_source) == ("measured", "samples", "forward calls")
    assert set(found.steps["samples"][3:]) == {14}


@pytest.mark.parametrize("flags", [(), ("named",)])
def test_evaluations_of_a_closure_count_if_the_training_is_one_step(trial: Trial, flags: tuple[str, ...]) -> None:
    found = trial("kinds.py", "one_step", *flags).result()
    assert (found.status, found.unit_source, set(found.steps["samples"])) == ("measured", "forward calls", {14})
    assert found.detected["steps_seen_by"] == EVALUATIONS


@pytest.mark.parametrize(("flags", "samples"), [((), {12}), (("twice",), {24, 36})])
def test_batch_at_which_an_epoch_is_left_early_is_not_counted(trial: Trial, flags: tuple[str, ...], samples: set[int]) -> None:
    """If a step takes several batches, it is not known which of them are used, so all are counted."""
    assert set(trial("kinds.py", "left_early", *flags).result().steps["samples"]) == samples


@pytest.mark.thorough
def test_model_compiled_after_some_steps_is_counted_and_keeps_its_precision(trial: Trial) -> None:
    run = trial("kinds.py", "compiled_late", knobs={"precision.amp": "bf16"})
    found = run.result()
    assert set(found.steps["samples"]) == {14}
    assert (found.detected["modules"], found.detected["compile"]) == (["OptimizedModule(Net)"], "default")
    assert run.stdout.count("torch.bfloat16") == 40


@pytest.mark.parametrize("flags", [(), ("decorated",), ("without_batch",)])
def test_a_step_that_is_compiled_after_some_others_is_counted(trial: Trial, flags: tuple[str, ...]) -> None:
    found = trial("kinds.py", "step_compiled_late", *flags, knobs={"precision.amp": "bf16"}).result()
    assert (found.unit_source, set(found.steps["samples"])) == ("forward calls", {14})
    assert (found.knobs["precision.amp"].status, found.knobs["precision.amp"].reason) == (NOT_APPLICABLE, IN_FUNCTION)


@pytest.mark.parametrize("kind", ["without_batch", "same_batch"])
def test_a_step_without_any_batch_counts_as_a_step(trial: Trial, kind: str) -> None:
    found = trial("kinds.py", kind).result()
    assert (found.status, found.unit) == ("measured", "steps")
    assert set(found.steps["samples"]) == {1}


def test_the_last_step_of_a_program_that_fetches_ahead_is_not_measured(trial: Trial) -> None:
    """The batch of this step was counted in an earlier step."""
    rules = dataclasses.replace(RULES, slow_step_s=60.0, min_s=60.0, max_s=60.0)
    found = trial("kinds.py", "fetched_ahead", rules=rules).result()
    assert (found.status, found.unit_source, found.steps["samples"][-1]) == ("ended", "loader", 0)
    assert found.window is not None
    assert found.window.samples == 12 * found.window.steps


def test_a_device_whose_steps_cannot_be_timed_is_refused_at_the_first_step(trial: Trial) -> None:
    run = trial("kinds.py", "elsewhere")
    reason = OTHER_DEVICE.format("xpu")
    assert run.result().error == {"type": UNMEASURABLE, "message": reason, "traceback": ""}
    assert f"autotune: {reason}; autotune ends the program here" in run.stdout


def test_copied_optimizer_does_not_keep_the_search_for_models_running(trial: Trial) -> None:
    assert trial("kinds.py", "copied_optimizer", mode="apply").stdout.split()[-1] == "True"


def test_a_model_that_is_compiled_after_some_steps_keeps_its_precision_in_a_real_run(trial: Trial) -> None:
    run = trial("kinds.py", "compiled_late", knobs={"precision.amp": "bf16"}, mode="apply")
    assert run.stdout.count("torch.bfloat16") == 40


@pytest.mark.parametrize("flags", [(), ("fused",)])
@pytest.mark.thorough
def test_iterations_that_a_scaler_skips_are_counted(trial: Trial, flags: tuple[str, ...]) -> None:
    found = trial("kinds.py", "scaler", *flags).result()
    assert (found.status, found.detected["num_steps"]) == ("ended", 5)
    assert set(found.steps["samples"]) == {12}
    assert found.scaling == {"scale": 0.5, "skipped": 2, "skipped_in_window": 2}


def test_skipped_steps_of_a_fused_optimizer_are_counted_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, overflows = torch.nn.Parameter(torch.ones(2)), Overflows()
    optimizer, scaler = torch.optim.SGD([parameter], fused=True), torch.amp.GradScaler("cpu")
    optimizer.register_step_post_hook(lambda stepped, args, kwargs: overflows.note(stepped))
    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "__int__", "__bool__"):
            patched.setattr(torch.Tensor, name, lambda tensor: pytest.fail("the device is waited for"))
        for number in range(2 * ADDED_TOGETHER + 3):
            scaler.scale(parameter.sum() * (float("inf") if number % 5 == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert overflows.number() == overflows.number() == len(range(0, 2 * ADDED_TOGETHER + 3, 5))
    optimizer.step()  # without the scaler
    assert overflows.number() == len(range(0, 2 * ADDED_TOGETHER + 3, 5))


@pytest.mark.parametrize("value", ["default", "foreach"])
def test_knob_can_replace_a_fused_optimizer_under_a_scaler(trial: Trial, value: str) -> None:
    """A scaler passes its scale to a fused optimizer but unscales for others, so it must see the implementation that is set."""
    found = trial("kinds.py", "scaler", "fused", knobs={"optimizer.implementation": value}).result()
    assert (found.status, found.detected["num_steps"], found.error) == ("ended", 5, None)
    assert found.knobs["optimizer.implementation"].status == APPLIED
    assert found.scaling is not None
    assert found.scaling["skipped"] == 2


def test_implementations_that_would_fail_are_not_chosen() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    assert _problem(optimizer, "fused") == ""
    table(torch.tensor([1])).sum().backward()
    assert _problem(optimizer, "fused") == "fused implementations need dense gradients"
    assert _problem(optimizer, "foreach") == ""
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        optimizer = kind(torch.nn.Linear(2, 2).parameters(), lr=torch.tensor(0.1))
        assert "tensors, and is not capturable" in _problem(optimizer, "foreach")
        assert _problem(optimizer, "fused") == _problem(optimizer, "default") == ""
        optimizer.param_groups[0]["capturable"] = True
        assert _problem(optimizer, "foreach") == ""


class OldAdagrad(torch.optim.Adagrad):
    """Checks parameters as torch's Adagrad did before it had a fused implementation for CUDA."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for parameter in group["params"]:
            _device_dtype_check_for_fused(parameter, cuda_unsupported=True)
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("kind", "is_refused"), [(OldAdagrad, True), (torch.optim.Adam, False)])
def test_a_fused_implementation_for_the_cpu_alone_is_not_chosen_on_a_gpu(kind: Any, is_refused: bool) -> None:
    with FakeTensorMode():  # tensors that say they are on a GPU
        on_gpu = kind([torch.nn.Parameter(torch.ones(2, device="cuda"))])
    problem = f"{kind.__name__} of this torch has a fused implementation only for the CPU" if is_refused else ""
    assert _problem(on_gpu, "fused") == problem
    assert _problem(kind([torch.nn.Parameter(torch.ones(2))]), "fused") == _problem(on_gpu, "foreach") == ""


class Orthogonal(torch.optim.Optimizer):
    """Has no implementations to choose from, as torch's Muon."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize("is_reversed", [False, True])
def test_implementation_is_set_beside_an_optimizer_that_has_no_choice(is_reversed: bool) -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [Orthogonal([first]), torch.optim.AdamW([second])]
    optimizers = optimizers[::-1] if is_reversed else optimizers
    knobs = OptimizerKnobs(context({KEY: "fused"}, optimizers=SimpleNamespace(counted=lambda: optimizers[0])))
    baseline = OptimizerKnobs(context())
    for optimizer in optimizers:
        baseline.on_optimizer(optimizer)
        knobs.on_optimizer(optimizer)
    assert (baseline.observe(), baseline.applicability()) == ({KEY: "default"}, {})
    assert knobs.verify()[KEY].status == APPLIED


class OwnStep(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


def test_optimizer_with_its_own_step_method_gets_unscaled_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = OwnStep([parameter], lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    OptimizerKnobs(context({"optimizer.implementation": "fused"})).on_optimizer(optimizer)
    scaler.scale(parameter.sum() / 2).backward()
    scaler.step(optimizer)
    assert parameter.tolist() == [0.5, 0.5]


class Counter(torch.Tensor):
    """A step counter from a checkpoint. It records to which devices it is moved."""

    moves: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.to:
            return super().__torch_function__(func, types, args, kwargs)
        cls.moves.append(str(kwargs["device"]))
        return args[0]


@pytest.mark.parametrize(
    ("value", "capturable", "device"),
    [("fused", False, "meta"), ("foreach", False, "cpu"), ("default", False, "cpu"), ("foreach", True, "meta")],
)
def test_step_counters_of_a_checkpoint_move_to_the_device_of_the_implementation(
    value: str, capturable: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counter, "moves", [])
    monkeypatch.setattr("autotune.harness.knobs.optimizer._problem", lambda optimizer, value: "")  # "meta" stands for a GPU
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.Adam([parameter], capturable=capturable)
    optimizer.state[parameter] = {"step": torch.zeros(()).as_subclass(Counter)}
    OptimizerKnobs(context({"optimizer.implementation": value})).on_optimizer(optimizer)
    assert Counter.moves == [device]


def test_state_of_a_checkpoint_gets_the_layout_that_fused_kernels_take_for_granted() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    mean = torch.randn(2, 3, 2, 2)
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": mean, "exp_avg_sq": mean**2}
    OptimizerKnobs(context({"optimizer.implementation": "fused"})).on_optimizer(optimizer)
    found = optimizer.state[parameter]["exp_avg"]
    assert found.stride() == parameter.stride()
    assert torch.equal(found, mean)
