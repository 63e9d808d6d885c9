"""The harness swaps the class of a model: what this must not change, and which modules are found to train."""

import dataclasses
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from autotune.harness.batches import CallSizes
from autotune.harness.calls import Calls, first_with_samples
from autotune.harness.knobs.module import IN_FP64, ModuleKnobs, device_of, observe
from autotune.harness.modules import ModuleWatch
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE
from autotune.harness.roots import Root
from tests.harness.conftest import RULES, SCRIPTS, Run, Trial
from tests.harness.contexts import context


def test_calls_count_if_no_backward_pass_reaches_any_model() -> None:
    """An evolution strategy calls its model with gradients enabled and never goes back through it."""
    calls, x = Calls(CallSizes(None)), torch.ones(5, 2)
    call = calls.begin((x,), {})
    assert call is not None
    calls.end(call, x * torch.ones(2, requires_grad=True))
    assert first_with_samples([calls]) == (0, 5.0)


def test_blocks_recomputed_in_the_backward_pass_are_not_counted_as_models(trial: Trial) -> None:
    assert trial("blocks.py", "checkpointed", mode="inspect").result().detected["modules"] == ["Net"]


def seen(run: Run) -> dict[str, Any]:
    """Returns what a program has printed, after a check that its trial was measured."""
    assert run.result().status == "measured", run.result().error
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[0])
    return found


def test_second_model_of_the_same_class_runs_with_its_own_weights(trial: Trial) -> None:
    assert seen(trial("models.py", "another")) == {"sums": [0.0, True]}


def test_a_wrapper_made_anew_in_each_step_is_not_taken_for_the_model(trial: Trial) -> None:
    run = trial("kinds.py", "wrapped_anew", knobs={"precision.amp": "bf16"})
    found = run.result()
    assert (found.detected["modules"], found.unit_source, set(found.steps["samples"])) == (["Linear"], "forward calls", {14})
    assert set(run.stdout.split("\n")[1:30]) == {"torch.float32"}  # the precision is set on the module in the wrapper
    assert found.knobs["precision.amp"].status == APPLIED


@pytest.mark.parametrize(
    ("mode", "words"),
    [("measure", "fork"), ("measure", "fork persistent"), ("measure", "forkserver persistent"), ("apply", "fork ends")],
)
def test_calls_of_transforms_in_loader_workers_are_not_slowed_down(trial: Trial, mode: str, words: str) -> None:
    run = trial("transforms.py", *words.split(), mode=mode, rules=dataclasses.replace(RULES, min_s=0.6))
    assert "watched in workers: [False]" in run.stdout, run.stderr
    assert mode == "apply" or run.result().detected["modules"] == ["Linear"]


def test_search_for_models_ends_in_a_forked_process_that_only_acts(trial: Trial) -> None:
    run = trial("transforms.py", "actor")
    assert "watched in actor: False" in run.stdout, run.stderr
    assert run.result().detected["modules"] == ["Linear"]


def test_search_for_models_begins_again_in_a_forked_process_that_trains(trial: Trial) -> None:
    found = trial("transforms.py", "trains", knobs={"precision.amp": "bf16"}).result()
    assert (found.status, found.detected["modules"]) == ("measured", ["Linear"])
    assert found.knobs["precision.amp"].status == APPLIED


def test_copies_of_the_model_that_are_gone_are_forgotten(trial: Trial) -> None:
    run = trial("kinds.py", "copies")
    number = re.search(r"roots: (\d+)", run.stdout)
    assert number is not None, run.stderr
    assert int(number[1]) <= 3


def test_a_program_may_move_parameters_whose_contents_torch_swaps(trial: Trial) -> None:
    found = trial("kinds.py", "swapped").result()
    assert (found.status, found.detected["modules"]) == ("measured", ["Linear"]), found.error


def test_steps_are_counted_if_modules_are_made_anew_in_each_step(trial: Trial) -> None:
    found = trial("kinds.py", "wrapped_anew", "rebuilt").result()
    assert (found.status, found.unit, set(found.steps["samples"])) == ("measured", "steps", {1})


def test_wrapper_keeps_the_type_that_programs_check(trial: Trial) -> None:
    run = trial("models.py", "wrapped", knobs={"precision.amp": "bf16"})
    assert seen(run) == {"names": ["layer.weight", "layer.bias"]}
    assert run.result().detected["modules"] == ["DataParallel(Net)"]
    assert run.result().detected["num_replicas"] == 1
    assert run.result().knobs["precision.amp"].status == APPLIED


@pytest.mark.parametrize(
    ("gpus", "asked", "status"),
    [([0, 1], "bf16", NOT_APPLICABLE), ([0, 1], "fp16", APPLIED), ([0], "bf16", APPLIED), ([], "bf16", APPLIED)],
)
def test_bf16_is_refused_by_data_parallel_on_several_gpus(gpus: list[int], asked: str, status: str) -> None:
    wrapper = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    wrapper.device_ids = gpus
    knobs: Any = ModuleKnobs(context({"precision.amp": asked}))
    assert (knobs.around_calls(wrapper) is None) == (status == NOT_APPLICABLE)
    assert knobs.verify()["precision.amp"].status == status
    knobs._context.modules.reported = [SimpleNamespace(observed=observe(wrapper))]
    assert ("precision.amp=bf16" in knobs.applicability()) == (len(gpus) > 1)
    assert observe(wrapper)["num_replicas"] == max(1, len(gpus))


class Offloaded(torch.nn.Parameter):
    """A shard that is kept in host memory while the GPU does not need it."""

    device_mesh = SimpleNamespace(device_type="cuda")


@pytest.mark.parametrize(
    ("kinds", "of_loss", "found"),
    [("cpu", "cpu", "cpu"), ("cpu", "cuda:1", "cuda"), ("cpu cuda", "cuda", "cuda"), ("mesh", "cpu", "cuda")],
)
def test_model_kept_in_host_memory_trains_on_the_device_that_computes(kinds: str, of_loss: str, found: str) -> None:
    with FakeTensorMode():  # tensors that say they are on GPUs
        on_device = [torch.nn.Parameter(torch.ones(2, device=kind)) for kind in kinds.split() if kind != "mesh"]
    parameters = on_device or [Offloaded(torch.ones(2))]
    model = torch.nn.ParameterList(parameters)
    optimizers = SimpleNamespace(optimizers=lambda: [SimpleNamespace(param_groups=[{"params": parameters}])])
    losses, writes = SimpleNamespace(device=torch.device(of_loss)), SimpleNamespace(watched=list)
    watch: Any = SimpleNamespace(living=[], _context=context(optimizers=optimizers, losses=losses, writes=writes))
    assert ModuleWatch.device(watch)[0] == found
    assert device_of(model) == (found if of_loss == "cpu" or len(on_device) > 1 else "cpu")


@pytest.mark.parametrize("asked", ["bf16", "fp16"])
def test_autocast_is_not_applicable_to_a_model_in_float64(asked: str) -> None:
    knobs: Any = ModuleKnobs(context({"precision.amp": asked}, device="cpu"))
    assert knobs.around_calls(torch.nn.Linear(2, 2, dtype=torch.float64)) is None
    assert (knobs.verify()["precision.amp"].status, knobs.verify()["precision.amp"].reason) == (NOT_APPLICABLE, IN_FP64)
    knobs._context.modules.roots = knobs._context.modules.reported = [
        SimpleNamespace(observed=observe(torch.nn.Linear(2, 2, dtype=torch.float64)))
    ]
    assert knobs.applicability()["precision.amp"] == IN_FP64


def test_autocast_in_float32_counts_as_none() -> None:
    before = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    torch.set_autocast_dtype("cpu", torch.float32)  # on a GPU, programs enter autocast in this format to turn it off
    torch.set_autocast_enabled("cpu", True)
    try:
        assert observe(torch.nn.Linear(2, 2))["precision.amp"] == "off"
    finally:
        torch.set_autocast_dtype("cpu", before[0])
        torch.set_autocast_enabled("cpu", before[1])


def test_weights_that_change_inside_another_autocast_are_cast_again() -> None:
    net, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    around = ModuleKnobs(context({"precision.amp": "bf16"}, device="cpu")).around_calls(net)
    assert around is not None
    with torch.autocast("cpu", enabled=False):  # around a whole training loop, say, in a program that trains in float32
        before = around(torch.nn.Module.__call__, net, (x,), {})
        with torch.no_grad():
            net.weight.add_(1.0)
        after = around(torch.nn.Module.__call__, net, (x,), {})
    assert torch.allclose(after - before, torch.full((1, 2), 2.0), atol=0.1)


def test_precision_follows_a_model_that_is_moved_after_its_first_call() -> None:
    net, enabled = torch.nn.Linear(2, 2), list[bool]()
    root = Root(net, {})
    root.device, root.around = "cuda", lambda *_: None  # as if its first call had been on a GPU
    watch: Any = SimpleNamespace(living=[root], is_looking=True)
    watch._knobs = ModuleKnobs(context({"precision.amp": "bf16"}, device="cpu"))
    ModuleWatch.begin_training(watch)
    root.around(lambda *_: enabled.append(torch.is_autocast_enabled("cpu")), net, (), {})
    assert enabled == [True]


def test_lazy_model_trains_in_the_trial_precision_once_it_has_shapes(trial: Trial) -> None:
    run = trial("models.py", "lazy", knobs={"precision.amp": "bf16"})
    assert seen(run) == {"dtypes": ["torch.bfloat16", "torch.float32"]}
    assert run.result().detected["modules"] == ["Sequential"]
    assert run.result().knobs["precision.amp"].status == APPLIED


def test_model_recomputed_in_the_backward_pass_keeps_its_precision(trial: Trial) -> None:
    run = trial("models.py", "checkpointed", knobs={"precision.amp": "bf16"})
    assert seen(run) == {}
    assert run.result().knobs["precision.amp"].status == APPLIED


@pytest.mark.parametrize("kind", ["Abstract", "Typed"])
def test_model_of_a_class_whose_first_base_is_not_a_module_gets_the_precision(trial: Trial, kind: str) -> None:
    run = trial("models.py", "based", kind, knobs={"precision.amp": "bf16"})
    assert run.result().knobs["precision.amp"].status == APPLIED, run.result().knobs


def test_precision_of_a_model_whose_class_cannot_be_changed_is_reported_fixed(trial: Trial) -> None:
    run = trial("models.py", "based", "Registered")
    assert seen(run) == {"registered": 0}
    why = "a Registered cannot be given another class: its calls stay as they are"
    assert run.result().applicability["precision.amp"] == why


def test_an_argument_of_a_model_may_have_any_name(trial: Trial) -> None:
    assert seen(trial("models.py", "named")) == {}


@pytest.mark.thorough
def test_program_that_compiles_its_model_gets_one_graph_as_without_the_harness(trial: Trial) -> None:
    assert seen(trial("models.py", "compiled", is_fresh=True)) == {"graphs": 1, "keeps_original": True}


@pytest.mark.parametrize(
    ("words", "mode", "compiled"),
    [
        ((), "default", ["evaluation", "training"]),
        (("single",), "reduce-overhead", ["evaluation", "training"]),
        ((), "reduce-overhead", ["training"]),
    ],
)
def test_several_models_with_cuda_graphs_are_evaluated_uncompiled(
    trial: Trial, words: tuple[str, ...], mode: str, compiled: list[str]
) -> None:
    """Otherwise, torch frees the first model's output before the second model reads it (pytorch #160281)."""
    for run_mode in ("measure", "apply"):
        run = trial("models.py", "evaluated", "ends", *words, knobs={"compile.mode": mode}, mode=run_mode)
        assert json.loads(run.stdout.splitlines()[0]) == {"compiled": compiled, "trained": True}, run.stderr


def test_a_model_that_was_compiled_can_be_traced(trial: Trial) -> None:
    run = trial("models.py", "traced", "ends", knobs={"compile.mode": "default"}, mode="apply")
    expected = {"compiled": True, "traced": True, "wrapper_is_compiled": False}
    assert json.loads(run.stdout.splitlines()[0]) == expected, run.stderr


@pytest.mark.thorough
def test_copies_pickles_and_attributes_of_a_model_show_its_original_class(trial: Trial) -> None:
    run = trial("friends.py", knobs={"precision.amp": "bf16"})
    seen = json.loads(run.stdout.splitlines()[0])
    assert run.result().knobs["precision.amp"].status == APPLIED
    assert seen.pop("types") == [True, True, True]
    assert seen["ema_runs_its_own_weights"]
    assert seen["model_has_its_own_still"]
    assert seen["class"]
    assert seen["registered"] == []
    assert not seen["file_has_harness"]
    assert seen["signature"] == "(x, *, scale=1.0)"
    assert seen["state"] == ["layer.weight", "layer.bias"]
    assert not [name for name in seen["own"] if "forward" in name and not name.startswith("_")]


@pytest.mark.thorough
def test_ddp_is_compiled_with_channels_last_and_bf16_and_both_ranks_end(trial: Trial) -> None:
    knobs = {"layout.channels_last": True, "precision.amp": "bf16", "compile.mode": "default"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    in_shell = {"nccl.algo": "allreduce:tree", "nccl.nvls": False, "env.SOME_SWITCH": "on"}
    environment = {"NCCL_ALGO": "allreduce:tree", "NCCL_NVLS_ENABLE": "0", "SOME_SWITCH": "on"}
    knobs |= in_shell  # every rank gets the variables; their effect on NCCL needs GPUs
    run = trial(f"{SCRIPTS}/ddp.py", argv=torchrun, knobs=knobs, env=environment)
    assert run.returncode == 0, run.stderr
    assert "caught" not in run.stdout
    assert "stride" not in run.stderr
    for rank in (0, 1):
        found = run.result(rank)
        assert (found.status, found.rank, found.world_size) == ("measured", rank, 2)
        assert {key: report.status for key, report in found.knobs.items()} == dict.fromkeys(knobs, APPLIED)
        assert found.detected["modules"] == ["DistributedDataParallel(Sequential)"]
        assert (found.observed["nccl.algo"], found.observed["nccl.nvls"]) == ("allreduce:tree", False)
        assert (found.facts["num_nodes"], "gloo" in found.facts["collectives"]) == (1, True)
    assert run.result(0).detected["num_steps"] == run.result(1).detected["num_steps"]
