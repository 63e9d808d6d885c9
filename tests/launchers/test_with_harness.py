"""The local launcher with the real harness and torch: how failing trials end. The contract tests use stubs."""

import json
import sys

import pytest

from autotune.failures import classify
from autotune.harness.explain.documents import PASSES, document_file
from autotune.harness.protocol import MeasureRules
from autotune.launchers.local import Graces, LocalLauncher
from autotune.records import Outcome
from tests.support.launcher_contract import a_launch, wait
from tests.support.rows import more

TRAIN = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(scale=1.0):
    optimizer.zero_grad(); (model(torch.ones(4, 8)).sum() * scale).backward(); optimizer.step()
"""
RULES = MeasureRules(warmup_min_device_s=0.05, min_s=0.2, max_s=1.0, warmup_max_s=2.0)


TRAIN_TOGETHER = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(1_000_000):
    optimizer.zero_grad(); model(torch.ones(4, 8)).sum().backward(); optimizer.step()
    if n == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def launcher():
    made = LocalLauncher(Graces())
    yield made
    made.close()


@pytest.fixture
def train(tmp_path, launcher):
    def run(body, argv=("-c",), **spec):
        folder = tmp_path / "runs" / "study" / "trials" / "0007"
        folder.parent.mkdir(parents=True)
        launch = a_launch(folder, [sys.executable, *argv, TRAIN + body])
        launch.spec.rules, launch.spec.device = RULES, "cpu"
        for name, value in spec.items():
            setattr(launch.spec, name, value)
        return classify(wait(launcher.start(launch)).facts(launch.spec))

    return run


@pytest.mark.thorough
def test_endless_training_is_measured(train):
    outcome, _ = train("while True: step()")
    assert outcome in (Outcome.ok, Outcome.unsteady)


@pytest.mark.thorough
def test_isolated_interpreter_has_no_harness(train):
    outcome, reason = train("step()", argv=("-I", "-c"))
    assert outcome is Outcome.error
    assert reason.startswith("harness not loaded")


@pytest.mark.thorough
def test_program_without_optimizer_steps_is_an_error(train):
    outcome, reason = train("model(torch.ones(4, 8))")
    assert outcome is Outcome.error
    assert reason.startswith("no optimizer step was seen")


@pytest.mark.thorough
def test_error_of_a_program_that_ends_early_states_its_number_of_steps(train):
    outcome, reason = train("step(); step(); step()")
    assert outcome is Outcome.error
    assert "after 3 optimizer steps" in reason


@pytest.mark.thorough
def test_exception_of_the_program_is_the_reason_of_the_error(train):
    assert train("step(); raise ValueError('bad batch')") == (Outcome.error, "ValueError: bad batch")


@pytest.mark.thorough
def test_colour_codes_are_removed_from_a_quoted_exception(train):
    raised = r"step(); raise ValueError('two options, \x1b[1mdo those\x1b[0m.\n(1) the first')"
    assert train(raised) == (Outcome.error, "ValueError: two options, do those. (1) the first")


@pytest.mark.thorough
def test_failed_allocation_on_the_cpu_is_host_oom(train):
    outcome, reason = train("step(); torch.empty(1 << 50)")
    assert outcome is Outcome.host_oom
    assert "DefaultCPUAllocator" in reason


@pytest.mark.thorough
def test_diverging_training_is_nonfinite(train):
    outcome, _ = train("while True: step(float('inf'))")
    assert outcome is Outcome.nonfinite


@pytest.mark.thorough
def test_segfault_of_one_rank_under_torchrun_makes_the_trial_a_crash(tmp_path, launcher):
    folder = tmp_path / "runs" / "study" / "trials" / "0007"
    folder.parent.mkdir(parents=True)
    (tmp_path / "ddp.py").write_text(TRAIN_TOGETHER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--max-restarts=0"]
    launch = a_launch(folder, [*torchrun, str(tmp_path / "ddp.py")])
    launch.spec.device = "cpu"
    outcome, reason = classify(wait(launcher.start(launch)).facts(launch.spec))
    assert outcome is Outcome.crash
    assert "SIGSEGV" in reason


def test_trial_with_a_knob_that_does_not_apply_is_invalid(train):
    outcome, reason = train("while True: step()", knobs={"loader.num_workers": 2})
    assert outcome is Outcome.invalid
    assert reason.startswith("loader.num_workers=2: ")


@pytest.mark.parametrize("which", [PASSES[0], *more(*PASSES[1:])])
def test_explain_pass_ends_ok_and_writes_its_document(train, tmp_path, which):
    outcome, reason = train("while True: step()", mode="explain", explain=which, max_s=0.5)
    assert (outcome, reason) == (Outcome.ok, "")
    written = json.loads((tmp_path / "runs" / "study" / "trials" / "0007" / document_file(which, 0)).read_text())
    assert written["rank"] == 0


@pytest.mark.thorough
def test_exception_during_a_pass_is_the_outcome_of_that_pass(train):
    body = "for n in range(10**6):\n    step()\n    if n == 3000: raise ValueError('later')"
    assert train(body, mode="explain", explain="lines", max_s=60.0) == (Outcome.error, "ValueError: later")
