"""When a trial counts as disturbed, and what a study does then."""

import contextlib

import pytest

from autotune.errors import BadInput, NothingWorked
from autotune.harness.protocol import RankResult, Window
from autotune.monitors.cpu import CpuUse
from autotune.monitors.disturbances import MIN_WINDOW_S, of_cpu, of_device, own_share
from autotune.monitors.nvml import NoDevice
from autotune.records import Kind, Outcome, TrialRecord
from autotune.report.verdict import noise_lines
from autotune.trials import health
from autotune.trials.health import Level
from autotune.trials.running import _join
from tests.study.conftest import FakeCpu
from tests.support.fake_launcher import OUT_OF_MEMORY, Failure, Surface
from tests.support.records import a_trial


def use(**what):
    return CpuUse(**{"seconds": 4.0, "num_cores": 2.0, "own_cores": 1.5, "foreign_cores": 0.0, "idle_cores": 0.0, **what})


@pytest.mark.parametrize(
    ("seen", "kinds"),
    [
        (use(foreign_cores=0.5), ["cpu"]),
        (use(foreign_cores=0.08), []),
        (use(foreign_cores=0.5, idle_cores=1.2), []),  # other processes have a free core
        (use(foreign_cores=1.0, waiting_cores=0.02), []),  # the kernel says that the trial hardly waited
        (use(foreign_cores=0.5, idle_cores=0.3, waiting_cores=0.6), ["cpu"]),
        (use(foreign_cores=0.5, idle_cores=1.2, waiting_cores=0.6), []),
        (use(foreign_cores=6.0, idle_cores=40.0, waiting_cores=0.6, num_cores=64.0), []),
        (use(foreign_cores=6.0, idle_cores=2.0, waiting_cores=0.6, num_cores=64.0), ["cpu"]),
        (use(waiting_cores=2.0), []),  # only the trial's own threads occupy the cores
        (use(foreign_cores=0.5, num_cores=64.0), []),  # negligible on a large machine
        (use(foreign_cores=None), []),
        (use(steal_cores=0.3), ["steal"]),
        (use(steal_cores=0.05), []),
        (use(foreign_cores=0.5, seconds=0.5), []),  # too short to judge
        (use(num_cores=4.0, own_cores=3.6, foreign_cores=0.4, idle_cores=None), ["cpu"]),  # the quota is used up
        (use(num_cores=4.0, own_cores=1.0, foreign_cores=0.4, idle_cores=None), []),
        (None, []),
    ],
)
def test_load_of_other_programs_disturbs_only_a_trial_short_of_cores(seen, kinds):
    assert [one.kind for one in of_cpu(seen)] == kinds


@pytest.mark.parametrize(
    ("metrics", "strangers", "kinds"),
    [
        ({}, {}, []),
        ({"gpu.slowdown_thermal_frac": 0.0005, "gpu.slowdown_power_brake_frac": 0.0}, {}, []),
        ({"gpu.slowdown_thermal_frac": 0.02}, {}, ["thermal"]),
        ({"gpu.slowdown_power_brake_frac": 0.002}, {}, ["power_brake"]),
        ({"gpu.slowdown_power_cap_frac": 0.9}, {}, []),  # caused by the trial's own power draw
        ({"gpu.sm_clock_frac": 0.7}, {}, ["clock"]),
        ({"gpu.sm_clock_frac": 0.8}, {}, []),
        ({}, {1: 0.3}, ["device"]),
        ({}, {1: 0.0}, []),  # present but idle
        ({}, {1: None}, ["device"]),  # a new process with unknown use
    ],
)
def test_external_limits_and_other_users_of_the_device_disturb(metrics, strangers, kinds):
    assert [one.kind for one in of_device(metrics, strangers)] == kinds


def disturbing(study, trials, *, cores=1.0, num_attempts=1):
    """Makes other processes use cores in the first `num_attempts` attempts of these trials. `study` is a list of one."""
    left = dict.fromkeys(trials, num_attempts)

    def failures(trial, knobs):
        left[trial] = left.get(trial, 0) - 1
        study[0].cpu.foreign_cores = cores if left[trial] >= 0 else 0.0

    return failures


def study_with(bench, trials, *overrides, **how):
    study = []
    surface = Surface(gains={("precision.amp", "bf16"): 2.0}, failures=disturbing(study, trials, **how))
    study.append(bench(surface, *overrides))
    return study[0]


def test_disturbed_trial_is_repeated_once_and_records_the_disturbance(bench):
    study = study_with(bench, {2})
    study.run()
    assert [launch.spec.trial for launch in study.launcher.launches][:5] == [0, 1, 2, 2, 3]
    record = study.trials[2]
    assert record.outcome is Outcome.ok
    assert record.evidence["earlier_attempt"]["outcome"] == "disturbed"
    assert "other programs used 1 of 4 cores" in record.evidence["earlier_attempt"]["reason"]
    assert record.metrics["host.foreign_cores"] == 0.0


def test_files_that_only_the_first_attempt_changed_are_reported(bench):
    study = study_with(bench, {2})
    first = {"/w/last.pt": "/w/kept/last.pt"}
    second = {"/w/last.pt": "/w/kept/2-last.pt", "/w/log.csv": "/w/kept/log.csv"}
    study.launcher.surface.files_aside += [{}, {}, first, second]
    study.run()
    assert study.trials[2].evidence["files_aside"] == {**second, **first}


def test_a_file_that_the_second_attempt_changes_is_not_called_unchanged():
    first, second = a_trial(2, evidence={"files_kept": ["a.csv", "b.csv"]}), a_trial(2)
    second.evidence["files_aside"] = {"a.csv": "/w/kept/a.csv"}
    _join(second, first)
    assert second.evidence["files_kept"] == ["b.csv"]


def test_disturbed_trial_is_not_recorded_if_its_second_attempt_cannot_start(bench, monkeypatch):
    def start(launch):
        if [one.spec.trial for one in study.launcher.launches].count(2):
            raise BadInput("cwd: no such folder")
        return begin(launch)

    study = study_with(bench, {2})
    begin = study.launcher.start
    monkeypatch.setattr(study.launcher, "start", start)
    with pytest.raises(BadInput):
        study.run()
    assert [record.number for record in study.trials] == [0, 1]


def test_trial_disturbed_twice_has_no_value(bench):
    study = study_with(bench, {2}, num_attempts=2)
    summary = study.run()
    record = study.trials[2]
    assert record.outcome is Outcome.disturbed
    assert record.value is None
    assert record.evidence["measured"]["value"] > 0, "nothing measured is ever lost"
    assert summary["counts"]["disturbed"] == 1
    assert summary["disturbed_by"] is None
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"


def test_disturbed_point_of_a_grid_is_measured_again_at_the_end(bench, tiny):
    study = study_with(bench, {2}, *tiny, "search.sampler=grid", num_attempts=2)
    study.run()
    disturbed, again = (study.trials[number] for number in (2, 4))
    assert disturbed.outcome is Outcome.disturbed
    assert again.outcome.has_value
    assert (again.changed, again.why) == (disturbed.changed, "again: trial 2 was disturbed")


def test_retry_waits_a_limited_time_for_the_disturbance_to_end(bench):
    study = study_with(bench, {0}, num_attempts=1)
    slept = study.clock.sleep

    def sleep(seconds):
        slept(seconds)
        if seconds == MIN_WINDOW_S and study.clock.now_s > until[0]:
            study.cpu.foreign_cores = 0.0

    until, study.clock.sleep = [study.clock.now_s + 20], sleep
    study.run()
    (said,) = [line for line in study.listener.named("notice") if "Waiting for a quiet machine, 12 s at most" in line]
    assert "other programs used 1 of 4 cores" in said
    assert study.trials[0].outcome is Outcome.ok


def test_study_on_a_machine_that_is_never_quiet_says_so_once_and_completes(bench):
    study = bench(Surface(gains={("precision.amp", "bf16"): 2.0}))
    study.cpu.foreign_cores = 0.9
    summary = study.run()
    said = [line for line in study.listener.named("notice") if "does not end" in line]
    assert len(said) == 1
    assert "disturbed" not in summary["counts"]
    assert summary["speedup"]["verdict"] == "faster"
    assert summary["disturbed_by"]["since_trial"] == 0
    assert summary["disturbed_by"]["level"] == {"cpu": 0.9}
    assert [launch.spec.trial for launch in study.launcher.launches][:4] == [0, 0, 1, 2], "only the first trial is repeated"


def test_noise_above_the_accepted_level_still_disturbs(bench):
    level = Level()
    level.amounts = {"cpu": 0.9}
    assert level.beyond(of_cpu(use(foreign_cores=0.95))) == []
    assert level.beyond(of_cpu(use(foreign_cores=1.3)))


def test_permanent_noise_is_accepted_after_two_trials_and_the_finals_still_decide(bench):
    study = study_with(bench, range(2, 100), num_attempts=9)
    summary = study.run()
    disturbed = [trial for trial in study.trials if trial.outcome is Outcome.disturbed]
    assert len(disturbed) == 1, "the second disturbed trial in a row keeps its value"
    assert summary["disturbed_by"]["since_trial"] >= 2
    assert summary["speedup"]["verdict"] == "faster"
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"


def test_one_burst_of_load_on_four_slots_is_not_accepted_for_good(bench):
    """It disturbed both attempts of each trial that ran then: eight in a row, but only two at different times."""

    class Burst(FakeCpu):
        @property
        def foreign_cores(self):
            return 1.0 if begun and study.clock.now_s < begun[0] + 26.0 else 0.0

    def failures(trial, knobs):
        kinds = [kind for _, kind, *_ in study.listener.named("trial_started")]
        if len(study.launcher.running) == 3 and kinds[-4:] == [Kind.search] * 4 and not begun:
            begun.append(study.clock.now_s)

    begun, surface = [], Surface(failures=failures)
    study = bench(surface, "search.sampler=random", "study.budget.trials=20", minutes=60, num_slots=4, cpu=Burst())
    summary = study.run()
    assert summary["counts"]["disturbed"] == 4
    assert summary["disturbed_by"] is None


def test_exploding_loss_rules_out_a_trial_whose_disturbance_is_accepted(bench):
    def losses(knobs, seed):
        return [2.0 * (1.3 if study[0].launcher.launches[-1].spec.trial == 2 else 0.97) ** step for step in range(64)]

    study = []
    surface = Surface(failures=disturbing(study, range(1, 99), num_attempts=9), losses=losses)
    study.append(bench(surface, "study.budget.trials=4"))
    study[0].run()
    exploded = study[0].trials[2]
    assert (exploded.outcome, exploded.value) == (Outcome.parity, None)
    assert exploded.reason.startswith("the loss exploded")


@pytest.mark.parametrize(("num_at_once", "num_waves"), [(1, 4), (4, 4), (8, 4)])
def test_attempts_disturbed_at_the_same_time_count_once(num_at_once, num_waves):
    """One burst of load on a machine with four slots made the study accept this load for good."""
    level = Level()
    for wave in range(num_waves):
        assert not level.is_stuck(Kind.search)
        for slot in range(num_at_once):
            level.note(Outcome.disturbed, began_s=20.0 * wave + slot, ended_s=20.0 * wave + slot + 10.0)
    assert level.is_stuck(Kind.search)
    level.note(Outcome.ok, began_s=20.0 * num_waves, ended_s=20.0 * num_waves + 10.0)
    assert not level.is_stuck(Kind.search)


def test_accepted_noise_level_is_restored_when_a_study_is_resumed():
    record = TrialRecord(number=0, kind=Kind.baseline, knobs={}, changed={}, outcome=Outcome.ok)
    record.evidence[health.ACCEPTED] = {"cpu": 0.9}
    assert Level([record]).amounts == {"cpu": 0.9}


def test_without_measure_quiet_a_disturbed_trial_counts_and_the_noise_is_recorded(bench):
    study = bench(Surface(), "measure.quiet=false", "study.budget.trials=1")
    study.cpu.foreign_cores = 0.9
    summary = study.run()
    assert set(summary["counts"]) == {"ok"}
    assert study.trials[0].evidence["disturbances"][0]["kind"] == "cpu"
    assert study.trials[0].metrics["host.foreign_cores"] == 0.9


def test_failure_on_a_noisy_machine_is_recorded_as_a_failure(bench):
    surface = Surface(failures=lambda trial, _: Failure(error={"type": "ValueError", "message": "x"}) if trial == 2 else None)
    study = bench(surface, "study.budget.trials=2")
    study.cpu.foreign_cores = 0.9
    study.run()
    assert study.trials[2].outcome is Outcome.error


def test_disturbed_round_of_the_finals_does_not_count_against_its_configuration(bench):
    study = []

    def failures(trial, knobs):
        kinds = [kind for _, kind, *_ in study[0].listener.named("trial_started")]
        is_hit = kinds[-1] is Kind.final and kinds.count(Kind.final) in (4, 7, 10)
        study[0].cpu.foreign_cores = 1.0 if is_hit else 0.0

    surface = Surface(gains={("precision.amp", "bf16"): 2.0}, failures=failures)
    study.append(bench(surface, "study.budget.trials=6", minutes=20))
    summary = study[0].run()
    finals = [trial for trial in study[0].trials if trial.kind is Kind.final]
    assert sum(trial.outcome is Outcome.disturbed for trial in finals) == 3
    assert summary["speedup"]["verdict"] == "faster"


class Hot(NoDevice):
    """A device that is too hot during the first window."""

    num_windows, is_hot = 0, False

    def open_window(self):
        self.num_windows += 1

    def metrics(self):
        return {"gpu.slowdown_thermal_frac": 0.4 if self.num_windows == 1 else 0.0}


def test_hot_device_cools_down_before_the_second_attempt(bench):
    study = bench(Surface(), "study.budget.trials=1", device=Hot())
    study.run()
    record = study.trials[0]
    assert record.outcome is Outcome.ok
    assert "too hot" in record.evidence["earlier_attempt"]["reason"]
    assert any("too hot. Waiting" in line for line in study.listener.named("notice"))
    assert study.clock.now_s - 1000 > 10, "the study waited for the device to cool down"


class Shared(NoDevice):
    """A device on which other processes appear after the first query."""

    def __init__(self, found):
        self.found, self.num_asked = found, 0

    def compute_processes(self):
        self.num_asked += 1
        return self.found if self.num_asked > 1 else {}


def test_process_ids_of_another_namespace_are_not_counted_as_foreign(bench):
    study = bench(Surface(), "study.budget.trials=1", device=Shared({2**22 + 5: 0.9}))
    summary = study.run()
    assert set(summary["counts"]) == {"ok"}
    assert "gpu.foreign_processes" not in study.trials[0].metrics


GIB = 2**30


@pytest.mark.parametrize(
    ("num_samples", "disk_bytes", "unit", "is_flagged"),
    [
        (10**6, 0, "samples", True),
        (10**6, 0.9 * GIB, "samples", False),
        (1000, 0, "samples", False),
        (None, 0, "samples", False),
        (10**6, None, "samples", False),
        (10**6, 0, "steps", False),  # each of which reads a batch of unknown size
        (10**6, 0, "tokens", False),
    ],
)
def test_data_larger_than_memory_but_read_from_the_page_cache_is_flagged(num_samples, disk_bytes, unit, is_flagged):
    window = Window(
        steps=10,
        seconds=4,
        samples=10_000,
        rate_per_s=2500,
        block_rates_per_s=[],
        half_width_frac=None,
        is_steady=True,
        reason="",
    )
    result = RankResult(trial=1, nonce="", rank=0, world_size=1, pid=1, status="measured", window=window)
    result.unit, result.detected = unit, {"loader": {"num_samples": num_samples}}
    why = health.page_cache(use(read_bytes=GIB, disk_bytes=disk_bytes), [result], memory_bytes=16 * GIB)  # 100 KiB per sample
    assert bool(why) is is_flagged
    assert not why or "about 100 GiB" in why
    assert health.page_cache(None, [], 16 * GIB) == ""


@pytest.mark.parametrize(
    ("first", "again", "said"),
    [
        (405.0, [73.0, 65.0], "ran at 405 samples/s first and at 65.0 to 73.0 when measured again"),
        (40.0, [65.0], "ran at 40.0 samples/s first and at 65.0 when measured again"),
        (405.0, [73.0, None], "first and at 73.0 when"),
        (100.0, [75.0, 110.0], ""),  # an ordinary difference between repeats
        (100.0, [None], ""),
        (None, [100.0, 30.0], ""),  # no first value
        (100.0, [], ""),
    ],
)
def test_large_drift_between_measurements_of_the_baseline_is_reported(first, again, said):
    def record(number, value, *, kind=Kind.final, repeats=0):
        outcome = Outcome.ok if value else Outcome.crash
        found = TrialRecord(number=number, kind=kind, knobs={}, changed={}, outcome=outcome, value=value, repeats=repeats)
        found.unit = "samples"
        return found

    baseline = record(0, first, kind=Kind.baseline, repeats=None)
    others = [record(1, 9.0, kind=Kind.search, repeats=None), record(2, 9.0, kind=Kind.parity), record(3, 9.0, repeats=1)]
    found = health.drift([baseline, *others, *(record(4 + n, value) for n, value in enumerate(again))])
    assert said in found
    assert bool(found) is bool(said)


def test_study_continues_if_its_baseline_crashes_once_and_is_disturbed_once(bench):
    study = []

    def failures(trial, knobs):
        if trial == 0 and len(study[0].launcher.launches) == 1:
            return Failure(signal="SIGSEGV", cause="exit")
        study[0].cpu.foreign_cores = 1.0 if trial == 0 else 0.0
        return None

    study.append(bench(Surface(failures=failures), "study.budget.trials=1"))
    summary = study[0].run()
    assert summary["status"] == "complete"
    assert summary["disturbed_by"]["since_trial"] == 0


@pytest.mark.parametrize("failure", [Failure(signal="SIGSEGV", cause="exit"), OUT_OF_MEMORY])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_disturbed_baseline_gets_a_third_attempt_if_its_second_fails(bench, failure, num_failures):
    study = []

    def failures(trial, knobs):
        num = len(study[0].launcher.launches)
        study[0].cpu.foreign_cores = 1.0 if num == 1 else 0.0
        return failure if 1 < num <= 1 + num_failures else None

    study.append(bench(Surface(failures=failures), "study.budget.trials=1"))
    with contextlib.suppress(NothingWorked):
        study[0].run()
    launched = [launch.spec.trial for launch in study[0].launcher.launches]
    baseline = study[0].trials[0]
    assert f"(third attempt; the second ended as {baseline.evidence['earlier_attempt']['outcome']})" in f"({baseline.reason})"
    assert baseline.seconds == pytest.approx(12.0 + 4.0 + baseline.attempt_s, abs=2.0)
    if num_failures == 1:
        assert (baseline.outcome, launched[:4]) == (Outcome.ok, [0, 0, 0, 1])
    else:
        assert (baseline.value, launched) == (None, [0, 0, 0])


def test_attempt_time_excludes_an_earlier_disturbed_attempt(bench):
    study = study_with(bench, {0}, num_attempts=1)
    study.run()
    baseline = study.trials[0]
    assert baseline.seconds == pytest.approx(2 * baseline.attempt_s)


def test_short_study_does_not_repeat_a_disturbed_baseline(bench):
    study = bench(Surface(start_s=10.0), minutes=1.5)
    study.cpu.foreign_cores = 0.9
    study.run()
    assert [launch.spec.trial for launch in study.launcher.launches].count(0) == 1
    assert study.trials[0].outcome is Outcome.ok


def test_message_states_how_many_cores_the_trial_may_use():
    (found,) = of_cpu(use(num_cores=1.0, own_cores=0.6, foreign_cores=0.4))
    assert found.words.startswith("other programs used 0.4 of 1 core (by processes")
    (found,) = of_cpu(use(num_cores=1.0, own_cores=0.6, foreign_cores=0.4, is_part=True, culprits=((2**22 + 1, 1.0),)))
    assert found.words.startswith("other programs used 0.4 of the 1 core that the trial may use (pid ")
    assert found.words.endswith(": 1 on all cores)")


@pytest.mark.parametrize(
    ("seen", "is_told"),
    [
        (use(num_cores=1.0, own_cores=1.0, tuner_cores=0.3, waiting_cores=0.4), True),
        (use(num_cores=1.0, own_cores=1.0, tuner_cores=0.05, waiting_cores=0.4), False),
        (use(num_cores=4.0, own_cores=1.3, tuner_cores=0.3, idle_cores=2.7), False),  # the tuner has a free core
        (use(num_cores=1.0, own_cores=1.0, tuner_cores=0.3, waiting_cores=0.0), False),
        (use(tuner_cores=0.3, seconds=0.5), False),
        (use(), False),
        (None, False),
    ],
)
def test_cpu_use_of_autotune_is_reported_only_if_it_slows_the_trial(seen, is_told):
    assert bool(own_share(seen)) is is_told
    assert of_cpu(seen) == []


def test_cpu_use_of_autotune_disturbs_no_trial_and_appears_in_the_verdict(bench):
    one = bench()
    one.cpu.tuner_cores = 0.4
    summary = one.run()
    assert summary["disturbed_by"] is None
    assert summary["own_share"].startswith("autotune itself used 0.4 of 4 cores, for which the trial waited")
    assert dict(noise_lines(summary))["shared"] == summary["own_share"]
