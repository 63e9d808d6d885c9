import signal

import pytest

from autotune.errors import NothingWorked
from autotune.harness.protocol import OVERRIDDEN, KnobReport
from autotune.monitors.nvml import NoDevice
from autotune.monitors.watch import MachineWatch
from autotune.records import Outcome
from autotune.run_dir import StudyFolder
from autotune.trials.running import USERS_STOP
from tests.support.fake_launcher import Failure, Surface


def once(numbers, failure):
    """Returns a failure rule: only the first attempts of the given trials fail."""
    seen = set()

    def failures(trial, knobs):
        if trial in numbers and trial not in seen:
            seen.add(trial)
            return failure
        return None

    return failures


@pytest.mark.parametrize("failure", [Failure(signal="SIGSEGV", cause="exit"), Failure(cause="deadline")])
def test_failure_that_may_be_chance_is_tried_once_more(bench, failure):
    study = bench(Surface(failures=once({0, 2}, failure)), "study.budget.trials=3")
    study.run()
    numbers = [launch.spec.trial for launch in study.launcher.launches]
    assert numbers[:5] == [0, 0, 1, 2, 2]
    assert study.trials[2].outcome is Outcome.ok
    assert "second attempt" in study.trials[2].reason
    assert study.trials[2].evidence["earlier_attempt"]["outcome"] in ("crash", "timeout")
    nonces = [launch.spec.nonce for launch in study.launcher.launches]
    assert len(set(nonces)) == len(nonces), "an earlier attempt's result must not be mistaken for this one's"


@pytest.mark.parametrize(("hang", "num_attempts"), [("collective", 1), ("user code", 1), ("loader", 2)])
def test_hang_with_a_known_cause_is_not_repeated_and_a_repetition_is_announced(bench, hang, num_attempts):
    fail = once({2}, Failure(cause="deadline", hang=hang))

    def failures(trial, knobs):
        if (failure := fail(trial, knobs)) is not None:
            (study.folder.trial_path(trial) / "stderr.log").write_text("of the first attempt")
        return failure

    study = bench(Surface(failures=failures), "study.budget.trials=2")
    study.run()
    assert [launch.spec.trial for launch in study.launcher.launches].count(2) == num_attempts
    said = [line for line in study.listener.named("notice") if "It is repeated" in line]
    assert len(said) == num_attempts - 1
    assert (study.folder.trial_path(2) / "stderr.first.log").exists() == (num_attempts == 2)


def test_first_trial_is_stopped_when_the_whole_budget_is_used_up(bench):
    study = bench(Surface(start_s=1000.0), minutes=1.5)
    with pytest.raises(NothingWorked):
        study.run()
    assert sum(trial.seconds for trial in study.trials) == pytest.approx(90, abs=5)
    assert len(study.launcher.launches) == 1


OUT_OF_MEMORY = {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory.", "traceback": "..."}


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, {"type": "MemoryError", "message": "", "traceback": "..."},
                                   {"type": "ValueError", "message": "bad shape", "traceback": "..."}])  # fmt: skip
def test_failure_that_would_recur_is_not_tried_again(bench, error):
    study = bench(Surface(failures=once({2}, Failure(error=error))), "study.budget.trials=3")
    study.run()
    assert [launch.spec.trial for launch in study.launcher.launches][:4] == [0, 1, 2, 3]
    assert study.trials[2].value is None


def test_failure_that_recurs_is_recorded_with_its_time(bench):
    def failures(trial, knobs):
        return Failure(signal="SIGSEGV", cause="exit") if trial == 2 else None

    study = bench(Surface(failures=failures), "study.budget.trials=3")
    summary = study.run()
    assert study.trials[2].outcome is Outcome.crash
    assert study.trials[2].value is None
    assert study.trials[2].seconds == pytest.approx(8.0)
    assert summary["seconds"]["lost"] == pytest.approx(8.0)


def test_a_knob_that_did_not_take_effect_makes_the_trial_invalid(bench):
    def failures(trial, knobs):
        overridden = {"precision.amp": KnobReport(status=OVERRIDDEN, reason="the program calls autocast itself")}
        return Failure(knob_reports=overridden) if knobs["precision.amp"] == "bf16" else None

    study = bench(Surface(gains={("precision.amp", "bf16"): 5.0}, failures=failures))
    summary = study.run()
    assert summary["counts"]["invalid"] >= 1
    assert "precision.amp" not in summary["best"]["overrides"]


def test_harness_receives_only_knobs_that_differ_from_the_baseline(bench):
    study = bench(Surface())
    study.run()
    for launch, trial in zip(study.launcher.launches, study.trials, strict=True):
        assert launch.spec.knobs == trial.changed
        assert all(study.surface.observed.get(key) != value for key, value in trial.changed.items())


def test_environment_knobs_are_set_before_the_interpreter_starts(bench):
    study = bench(Surface(), "threads.omp=3", "env.MALLOC_ARENA_MAX='2'", "study.budget.trials=1")
    study.run()
    for launch in study.launcher.launches:
        assert launch.env["OMP_NUM_THREADS"] == "3"
        assert launch.env["MALLOC_ARENA_MAX"] == "2"


def test_knobs_named_in_the_command_are_passed_on_the_command_line(bench):
    command = ("python", "-c", "pass", "--batch", "{loader.batch_size=16}")
    study = bench(Surface(observed={**Surface().observed, "loader.batch_size": 16}), command=command)
    study.run()
    first, *others = study.launcher.launches
    assert first.argv[-1] == "16"
    assert {launch.argv[-1] for launch in others} > {"16"}
    for launch in study.launcher.launches:
        assert launch.argv[-1] == str(launch.spec.passed["loader.batch_size"])
        assert "loader.batch_size" not in launch.spec.knobs


def test_trials_share_a_compile_cache_inside_the_study(bench):
    study = bench(Surface(), "study.budget.trials=1")
    study.run()
    caches = {launch.env["TORCHINDUCTOR_CACHE_DIR"] for launch in study.launcher.launches}
    assert caches == {str((study.folder.path / "compile_cache").absolute())}


class FakeDevice(NoDevice):
    def __init__(self):
        self.num_restarts = self.num_samples = 0

    def restart(self):
        self.num_restarts += 1

    def sample(self, *, is_steady):
        self.num_samples += 1

    def metrics(self):
        return {"gpu.power_w": 250.0, "gpu.energy_j": 800.0, "gpu.energy_s": 4.0}


def test_device_monitor_restarts_for_each_trial_and_its_metrics_are_recorded(bench):
    device = FakeDevice()
    study = bench(Surface(), "study.budget.trials=2", device=device)
    study.run()
    assert device.num_restarts == len(study.launcher.launches)
    assert device.num_samples >= 5 * len(study.launcher.launches)
    first = study.trials[0]
    assert first.metrics["gpu.power_w"] == 250.0
    assert first.metrics["gpu.energy_per_sample_j"] == pytest.approx(200.0 / first.value)
    assert first.metrics["step_p50_s"] == pytest.approx(0.1)
    assert "host.load_per_core" in first.metrics


@pytest.mark.parametrize("number", [0, 3])
def test_keyboard_interrupt_loses_no_measurement(bench, number):
    def failures(trial, knobs):
        return Failure(raises=KeyboardInterrupt) if trial == number else None

    study = bench(Surface(gains={("precision.amp", "bf16"): 2.0}, failures=failures))
    summary = study.run()
    assert summary["status"] == "interrupted"
    assert [trial.number for trial in study.trials] == list(range(number + 1))
    assert study.trials[-1].outcome is Outcome.interrupted
    assert all(trial.outcome is Outcome.ok for trial in study.trials[:-1])
    assert not study.launcher.running
    assert study.folder.read_summary() == summary
    if number:
        assert summary["speedup"]["verdict"] == "ambiguous"
        assert "overstate" in summary["speedup"]["reason"]
    else:
        assert summary["best"] is None


def test_first_ctrl_c_lets_the_running_trial_finish(bench):
    def failures(trial, knobs):
        if trial == 2:
            signal.raise_signal(signal.SIGINT)
        return

    study = bench(Surface(failures=failures))
    before = signal.getsignal(signal.SIGINT)
    summary = study.run()
    assert summary["status"] == "interrupted"
    assert [trial.outcome for trial in study.trials] == [Outcome.ok] * 3
    assert any("Ctrl-C again" in line for line in study.listener.named("notice"))
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_stops_the_running_trial(bench):
    def failures(trial, knobs):
        if trial == 2:
            signal.raise_signal(signal.SIGINT)
            return Failure(raises=KeyboardInterrupt)
        return None

    study = bench(Surface(failures=failures))
    summary = study.run()
    assert summary["status"] == "interrupted"
    assert [trial.outcome for trial in study.trials] == [Outcome.ok, Outcome.ok, Outcome.interrupted]


def test_study_that_is_stopped_before_it_begins_leaves_nothing(bench, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    study = bench()
    monkeypatch.setattr(StudyFolder, "write_study", stopped)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    study.folder.discard()
    assert not study.folder.path.exists(), "a folder without study.json cannot be resumed"


def test_interrupt_in_the_finals_reports_the_rounds_measured_so_far(bench):
    fired = []

    def failures(trial, knobs):
        reported = [t for t in study.trials if t.why == "finals, reported"]
        if len(reported) >= 5 and not fired:
            fired.append(trial)
            return Failure(raises=KeyboardInterrupt)
        return None

    study = bench(Surface(gains={("precision.amp", "bf16"): 2.0}, failures=failures), "study.budget.trials=6", minutes=20)
    summary = study.run()
    assert summary["status"] == "interrupted"
    assert summary["speedup"]["verdict"] == "faster"
    assert summary["speedup"]["num_rounds"] >= 2


def test_trial_stopped_before_its_processes_start_is_recorded_as_stopped(bench, monkeypatch):
    before, begun = MachineWatch.before, []

    def stopped(self, **limits):
        begun.append(self)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return before(self, **limits)

    monkeypatch.setattr(MachineWatch, "before", stopped)
    study = bench(Surface())
    assert study.run()["status"] == "interrupted"
    assert [(trial.outcome, trial.reason) for trial in study.trials[2:]] == [(Outcome.interrupted, USERS_STOP)]
    assert study.folder.read_cut_off() == [], "a resumed study would take it for a trial during which autotune was killed"
