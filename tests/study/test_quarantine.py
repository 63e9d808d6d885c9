import dataclasses
import sys

import pytest

from autotune.clock import Clock
from autotune.launchers.base import Ended, Launcher, Running
from autotune.launchers.local import LocalLauncher
from autotune.records import Kind, Outcome, TrialRecord
from autotune.studies import foreign
from autotune.trials.quarantine import Quarantine, quarantine, sticky_fault
from tests.study.test_slots import QUIET
from tests.support.fake_launcher import Failure, Surface

ILLEGAL = "CUDA error: an illegal memory access was encountered"


def trial(number, outcome=Outcome.error, reason=f"torch.AcceleratorError: {ILLEGAL}", **changed):
    return TrialRecord(number=number, kind=Kind.search, knobs=changed, changed=changed, outcome=outcome, reason=reason)


class Probe:
    """A fake probe with a fixed answer. It counts its calls."""

    def __init__(self, answer):
        self.answer, self.num_asked = answer, 0

    def __call__(self, record):
        self.num_asked += 1
        return self.answer


def judge(probe):
    return Quarantine(probe, device=lambda _: "device 0 (H100)", advice="See dmesg")


@pytest.mark.parametrize(
    "words",
    [
        ILLEGAL,
        "CUDA error: device-side assert triggered",
        "CUDA error: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "Unable to determine the device handle: GPU has fallen off the bus",
        "NVRM: Xid (PCI:0000:65:00): 79, pid=1234",
        "cudaErrorIllegalAddress",
    ],
)
def test_errors_that_break_the_cuda_context_are_recognised(words):
    assert sticky_fault(trial(1, reason=f"RuntimeError: {words}")) in words
    record = trial(1, Outcome.crash, reason="the program was ended by SIGABRT in phase steady")
    record.evidence["log_tail"] = f"terminate called\n  what():  {words}\nCUDA kernel errors might be ..."
    assert sticky_fault(record) in words


@pytest.mark.parametrize(
    "record",
    [
        trial(1, Outcome.ok, reason=""),
        trial(1, Outcome.device_oom, reason="torch.OutOfMemoryError: CUDA out of memory"),
        trial(1, reason="RuntimeError: CUDA error: out of memory"),
        trial(1, reason="ValueError: device-side shape mismatch"),
        trial(1, reason="RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    ],
)
def test_other_failures_are_not_attributed_to_the_device(record):
    assert sticky_fault(record) == ""


def test_device_that_fails_with_two_configurations_and_in_the_probe_is_quarantined():
    device, probe = judge(probe := Probe("torch.AcceleratorError: CUDA error: unknown error")), probe
    assert device.note(trial(3, batch=64)) == ""
    assert probe.num_asked == 0
    said = device.note(trial(4, batch=128))
    assert said == (
        f"device 0 (H100) is faulty: trials 0003 ({ILLEGAL}), 0004 ({ILLEGAL}) failed, then a simple computation, too: "
        "torch.AcceleratorError: CUDA error: unknown error. See dmesg"
    )


def test_device_that_passes_the_probe_is_not_quarantined():
    device, probe = judge(probe := Probe("")), probe
    assert [device.note(trial(number, batch=number)) for number in range(4)] == ["", "", "", ""]
    assert probe.num_asked == 2


def test_two_failures_of_one_configuration_do_not_trigger_the_probe():
    device, probe = judge(probe := Probe("broken")), probe
    assert [device.note(trial(number, batch=64)) for number in (3, 9)] == ["", ""]
    assert probe.num_asked == 0


def test_success_between_two_failures_clears_the_device():
    device, probe = judge(probe := Probe("broken")), probe
    device.note(trial(3, batch=64))
    device.note(trial(4, Outcome.ok, reason=""))
    assert device.note(trial(5, batch=128)) == ""
    assert probe.num_asked == 0


def test_success_on_another_slot_does_not_clear_the_device():
    device, probe = judge(probe := Probe("broken")), probe
    for number, slot, outcome in [(3, "1", Outcome.error), (4, "2", Outcome.ok), (5, "2", Outcome.error)]:
        assert device.note(dataclasses.replace(trial(number, outcome, batch=number), slot=slot)) == ""
    assert probe.num_asked == 0
    assert "trials 0003 (" in device.note(dataclasses.replace(trial(6, batch=6), slot="1"))


def test_study_on_a_broken_device_ends_early_and_keeps_its_results(bench):
    broken = Failure(signal="SIGABRT", log_tail=f"terminate called after throwing\n  what():  {ILLEGAL}")
    surface = Surface(failures=lambda number, knobs: broken if number >= 2 else None)
    surface.facts["executable"] = sys.executable
    study = bench(surface)
    gpus = [{"name": "H100", "uuid": f"GPU-{number}", "memory_bytes": 80 * 2**30} for number in (1, 2)]
    study.inputs.machine = {**study.inputs.machine, "gpus": gpus}
    summary = study.run()
    assert summary["status"] == "interrupted"
    assert summary["reason"].startswith("device 0 (H100, GPU-1) is faulty: trials 0002 (CUDA error")
    assert summary["reason"].endswith("or tune on another device: device.index=1 (one of 1)")
    assert [record.outcome for record in study.trials] == ["ok", "ok", "crash", "crash"]
    assert "second attempt" in study.trials[2].reason


@pytest.fixture
def four_slots(bench):
    """A study on four slots; the device of slot `broken` fails once the search has begun."""

    def run(broken):
        surface = Surface(**QUIET)
        surface.facts["executable"] = sys.executable
        study = bench(surface, "search.sampler=random", "study.budget.trials=20", minutes=60, num_slots=4)
        surface.on_slot = lambda slot: 0.0 if slot == broken and len(study.launcher.launches) > 26 else 1.0
        return study, study.run()

    return run


def test_study_goes_on_without_a_slot_whose_device_broke(four_slots):
    study, summary = four_slots("3")
    assert summary["status"] == "complete"
    (said,) = [line for line in study.listener.named("notice") if "goes on without" in line]
    assert said.startswith("The study goes on without slot 3: the device of slot 3 is faulty: trials ")
    assert "resume" not in said
    (probed,) = [launch for launch in study.launcher.launches if launch.spec.mode == "inspect"]
    assert study.folder.read_trial(probed.spec.trial).slot == "3"
    searched = [record for record in study.trials if record.kind is Kind.search]
    assert {record.slot for record in searched if record.number > probed.spec.trial + 3} == {"1", "2", "4"}


def test_study_ends_if_the_device_of_trials_that_run_alone_broke(four_slots):
    study, summary = four_slots("1")
    assert summary["status"] == "interrupted"
    assert summary["reason"].startswith("the device of slot 1 is faulty")
    assert summary["reason"].endswith("have the device reset, then resume")
    assert not study.launcher.running


class LostNode(Launcher, Running):
    """A node that is lost during the probe. `waiting` says why there is no replacement, `ended` how the probe ended."""

    def __init__(self, waiting, ended):
        self.waiting, self.ended, self.is_stopped = waiting, ended, False

    def start(self, launch):
        return self

    def poll(self):
        assert self.waiting or self.ended, "waits forever"
        return self.ended

    def progress(self):
        return None

    def stop(self, reason):
        self.is_stopped = True

    def why_waiting(self):
        return self.waiting


@pytest.mark.parametrize(
    ("waiting", "ended"), [("Resources", None), ("", Ended.stopped("node n1 was lost: silent", phase="spawn", seconds=3.0))]
)
def test_node_lost_during_the_probe_does_not_quarantine_its_device(bench, waiting, ended):
    study = bench(Surface())
    study.inputs.launcher = node = LostNode(waiting, ended)
    device = quarantine(study.inputs, study.folder, lambda: sys.executable)
    device.note(trial(3, batch=64))
    assert device.note(trial(4, batch=128)) == ""
    assert node.is_stopped


@pytest.mark.parametrize(
    ("executable", "expected"),
    [(sys.executable, ""), ("/nowhere/python", "the command cannot be started: '/nowhere/python'"), (None, "")],
)
def test_probe_uses_the_torch_of_the_program(bench, executable, expected):
    study = bench(Surface(), "device.kind=cpu")
    study.inputs.launcher, study.inputs.clock = LocalLauncher(), Clock()
    device = quarantine(study.inputs, study.folder, lambda: executable)
    try:
        device.note(trial(3, batch=64))
        said = device.note(trial(4, batch=128))
    finally:
        study.inputs.launcher.close()
    assert expected in said
    assert bool(said) == bool(expected)
    assert foreign(study.folder.path) == [], "prune would refuse to remove the study"


def test_message_names_the_device_that_the_program_sees(bench, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a")
    study = bench(Surface(), "device.kind=cpu")
    gpus = [{"name": "H200", "uuid": uuid} for uuid in ("GPU-a", "GPU-b", "GPU-c")]
    monkeypatch.setitem(study.inputs.machine, "gpus", gpus)  # for this test only: the other studies share these facts
    device = quarantine(study.inputs, study.folder, lambda: None)
    assert device._device(trial(3)) == "device 0 (H200, GPU-c)"
    assert device.advice.endswith("device.index=1 (one of 1)")
