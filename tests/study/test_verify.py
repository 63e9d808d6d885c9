"""Verification of claims: simulations test the arithmetic, and the fake launcher runs the rounds."""

import dataclasses
import math
import subprocess
from collections import Counter

import numpy as np
import pytest

from autotune import stats
from autotune.cli.plain import View
from autotune.compare.decision import Decision
from autotune.compare.verify import LONG, ROUND, compare, differences, verification
from autotune.config.claim import Claim, Rate, Verify
from autotune.errors import NothingWorked
from autotune.harness.protocol import NOT_APPLICABLE, KnobReport
from autotune.records import Kind, Outcome, StudyRecord
from autotune.stats import Ratio
from autotune.study import resume_study, run_study
from tests.support.fake_launcher import Failure, Surface
from tests.support.records import a_trial

BF16 = {"precision.amp": "bf16"}
FASTER = Surface(gains={("precision.amp", "bf16"): 1.5}, loader_per_s=1e6, start_s=1.0, window_s=3.0)
CLAIMED = Ratio(ratio=1.5, ci=(1.47, 1.53), num_rounds=5)


def claim(speedup=CLAIMED, changed=BF16, **more):
    return Claim(file="best.yaml", study="s", changed=changed, speedup=speedup, **more)


@pytest.fixture
def verified(bench):
    """Returns a function that returns a study, not yet run, to verify a claim on a fake program."""

    def _verified(surface=FASTER, of=None, *overrides, rounds=4, minutes=10.0, long_minutes=None, seed=0):
        wanted = Verify(claim=of or claim(), rounds=rounds, minutes=minutes, long_minutes=long_minutes)
        study = bench(surface, "study.budget.minutes=null", "search_space=quick", *overrides, seed=seed, verify=wanted)
        study.inputs.space.domains.clear()
        return study

    return _verified


def measured(rng, *, true, noise, rounds):
    own, other = (np.exp(rng.normal(math.log(rate), noise, rounds)).tolist() for rate in (100 * true, 100))
    return stats.paired_ratio(own, other), stats.margin_frac(other)


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
@pytest.mark.parametrize("true", [1.02, 1.2, 2.0])
def test_true_claim_is_refused_in_at_most_5_percent_of_cases(true, noise):
    rng, found = np.random.default_rng(1), Counter()
    for number in range(300):
        claimed, _ = measured(rng, true=true, noise=noise, rounds=(2, 3, 5, 8)[number % 4])
        found[compare(claimed, *measured(rng, true=true, noise=noise, rounds=4)).verdict] += 1
    assert found["no longer holds"] <= 15, found


@pytest.mark.parametrize("true", [1.05, 1.2, 2.0])
def test_speedup_lower_by_a_fifth_is_found_in_95_percent_of_cases_at_2_percent_noise(true):
    rng, found = np.random.default_rng(2), Counter()
    for number in range(300):
        claimed, _ = measured(rng, true=true, noise=0.02, rounds=(3, 5, 8)[number % 3])
        found[compare(claimed, *measured(rng, true=0.8 * true, noise=0.02, rounds=4)).verdict] += 1
    assert found["no longer holds"] >= 285, found


def test_true_claim_of_30_percent_is_confirmed_in_95_percent_of_cases():
    rng, found = np.random.default_rng(3), Counter()
    for _ in range(300):
        claimed, _ = measured(rng, true=1.3, noise=0.02, rounds=5)
        found[compare(claimed, *measured(rng, true=1.3, noise=0.02, rounds=4)).verdict] += 1
    assert found["holds"] >= 285, found


def test_claim_from_a_single_round_is_judged_with_the_spread_of_one_round():
    rng, found = np.random.default_rng(4), Counter()
    for _ in range(300):
        once, _ = measured(rng, true=1.3, noise=0.02, rounds=1)
        found[compare(once, *measured(rng, true=1.3, noise=0.02, rounds=4)).verdict] += 1
    assert found["no longer holds"] <= 15, found
    assert found["holds"] >= 270, found


def test_interval_of_the_quotient_covers_the_true_value_in_about_95_percent():
    rng, hits = np.random.default_rng(5), 0
    for _ in range(500):
        then, _ = measured(rng, true=1.4, noise=0.03, rounds=4)
        now, _ = measured(rng, true=1.2, noise=0.03, rounds=6)
        low, high = stats.quotient(now, then).ci
        hits += low <= 1.2 / 1.4 <= high
    assert 460 <= hits <= 490


def test_interval_of_a_claim_for_two_looks_is_not_read_as_one_of_95_percent():
    """The interval of the quotient was too wide by up to a fifth, so too few broken claims were found."""
    rates, others = [1.48, 1.50, 1.53, 1.49], [1.0, 1.01, 0.99, 1.0]
    now = stats.paired_ratio([1.4, 1.41, 1.39, 1.4], others)
    one, two = (stats.paired_ratio(rates, others, confidence) for confidence in stats.LOOK_CONFIDENCE.values())
    assert two.ci[1] > one.ci[1]
    assert stats.quotient(now, two).ci == pytest.approx(stats.quotient(now, one).ci)


@pytest.mark.parametrize(
    ("now", "verdict", "reason"),
    [
        (Ratio(ratio=1.49, ci=(1.45, 1.53), num_rounds=4), "holds", ""),
        (Ratio(ratio=1.80, ci=(1.70, 1.90), num_rounds=4), "holds", ""),
        (Ratio(ratio=1.20, ci=(1.18, 1.22), num_rounds=4), "no longer holds", "1.20x here and now, but 1.50x is claimed"),
        (Ratio(ratio=1.45, ci=(1.00, 2.10), num_rounds=4), "ambiguous", "anything from 1.00x to 2.10x"),
        (Ratio(ratio=1.45, ci=None, num_rounds=1), "ambiguous", "one round only"),
    ],
)
def test_verdict_and_reason_follow_from_the_measured_speedup(now, verdict, reason):
    found = compare(CLAIMED, now)
    assert found.verdict == verdict
    assert reason in found.reason


def test_speedup_that_is_gone_refutes_even_a_claim_with_a_wide_interval():
    found = compare(Ratio(ratio=1.3, ci=(0.7, 2.4), num_rounds=2), Ratio(ratio=0.98, ci=(0.96, 1.0), num_rounds=4))
    assert found.verdict == "no longer holds"
    assert "not faster than the baseline any more" in found.reason


def test_claim_holds_if_the_difference_is_within_the_spread_of_the_machine():
    now = Ratio(ratio=1.44, ci=(1.435, 1.445), num_rounds=4)
    exact = Ratio(ratio=1.5, ci=(1.495, 1.505), num_rounds=5)
    assert compare(exact, now, 0.01).verdict == "no longer holds"
    assert compare(exact, now, 0.05).verdict == "holds"


@pytest.mark.parametrize(("now", "verdict"), [(0.80, "holds"), (0.66, "no longer holds"), (0.95, "holds")])
def test_claim_of_a_best_that_is_slower_than_a_barred_baseline_can_hold(now, verdict):
    """Whatever was measured, such a claim was undecided: half of a loss can never be shown to be a gain."""
    claimed = Ratio(ratio=0.80, ci=(0.79, 0.81), num_rounds=5)
    assert compare(claimed, Ratio(ratio=now, ci=(now - 0.01, now + 0.01), num_rounds=4)).verdict == verdict


def test_true_claim_holds(verified):
    study = verified()
    summary = study.run()
    found = summary["verification"]
    assert (summary["status"], found["verdict"]) == ("complete", "holds")
    assert found["claimed"]["ratio"] == 1.5
    assert found["now"]["ratio"] == pytest.approx(1.5, rel=0.05)
    assert found["left"]["ci"][0] < 1 < found["left"]["ci"][1]
    assert summary["best"]["overrides"] == BF16


def test_rounds_alternate_and_exclude_the_first_measurement_of_each_side(verified):
    study = verified(rounds=3)
    study.run()
    kinds = [(str(trial.kind), trial.repeats) for trial in study.trials]
    assert kinds[:2] == [("baseline", None), ("search", None)]
    turns = [number for _, number in kinds[2:]]
    assert sorted(turns) == [0, 0, 0, 1, 1, 1]
    assert turns[:2] == turns[2:4][::-1]
    assert all(trial.why == ROUND for trial in study.trials[2:])


def test_a_planted_slowdown_is_found(verified):
    slow = Surface(gains={("precision.amp", "bf16"): 1.15}, loader_per_s=1e6, start_s=1.0, window_s=3.0)
    found = verified(slow).run()["verification"]
    assert found["verdict"] == "no longer holds"
    assert found["reason"].startswith(f"{found['now']['ratio']:.2f}x here and now, but 1.50x is claimed: only 0.7")


def test_claim_does_not_hold_if_its_configuration_violates_a_constraint_here(verified):
    """A study never chooses such a configuration, but its verification said that the claim holds."""
    of = claim(changed={**BF16, "loader.batch_size": 800})
    found = verified(FASTER, of, "constraints.memory_free_frac=0.5").run()["verification"]
    assert found["now"]["ratio"] > 1.5
    assert found["verdict"] == "no longer holds"
    words = "constraints.memory_free_frac: leaves 20.0% of the memory free, wanted 50.0%"
    assert found["reason"] == f"it violates a constraint here: {words}"


def test_first_measurement_does_not_count_against_a_constraint():
    """It fills caches. A single violation in the rounds may be noise."""
    over = {"violations": {"constraints.max_step_p95_s": 0.1}, "outcome": Outcome.infeasible}
    first = a_trial(1, changed=BF16, knobs=BF16, value=90.0, **over)
    rates = (60.0, 90.0)
    rounds = [in_turn(number, number % 2, rates[number % 2], **(over if number == 3 else {})) for number in range(2, 10)]
    decision = Decision(ratio=Ratio(ratio=1.5, ci=(1.45, 1.55), num_rounds=4))
    assert summarised([FIRSTS[0], first, *rounds], decision)["verdict"] == "holds"
    assert summarised([FIRSTS[0], first, *rounds, in_turn(11, 1, 90.0, **over)], decision)["verdict"] == "no longer holds"


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            Failure(knob_reports={"precision.amp": KnobReport(status=NOT_APPLICABLE, reason="no autocast here")}),
            "invalid: precision.amp",
        ),
        (Failure(error={"type": "RuntimeError", "message": "no such kernel", "traceback": ""}), "error: RuntimeError"),
    ],
)
def test_configuration_that_cannot_be_applied_or_fails_refutes_its_claim(verified, failure, words):
    surface = Surface(gains=FASTER.gains, failures=lambda trial, knobs: failure if knobs["precision.amp"] == "bf16" else None)
    study = verified(surface)
    found = study.run()["verification"]
    assert found["verdict"] == "no longer holds"
    assert words in found["reason"]
    assert len(study.trials) == 2, "no round is measured"


def test_configuration_that_fails_in_its_rounds_refutes_its_claim(verified):
    crash = Failure(error={"type": "RuntimeError", "message": "boom", "traceback": ""})
    surface = Surface(
        gains=FASTER.gains, failures=lambda trial, knobs: crash if trial > 1 and knobs["precision.amp"] == "bf16" else None
    )
    found = verified(surface).run()["verification"]
    assert found["verdict"] == "no longer holds"
    assert "boom" in found["reason"]


def summarised(records, decision, of=None, **identity):
    """Returns the verification in the summary of a study that has measured the trials of a claim."""
    wanted = Verify(claim=of or claim(), rounds=4, minutes=10.0)
    about = StudyRecord(name="v", title="t", command=[], cwd="", identity=identity, verifies=dataclasses.asdict(wanted))
    return verification(about, records, decision)


def in_turn(number, repeats, score, **more):
    """Returns a trial of the rounds: of the baseline (`repeats` 0) or of the file's configuration (1)."""
    changed = BF16 if repeats else {}
    return a_trial(number, kind=Kind.final, repeats=repeats, changed=changed, why=ROUND, value=score, round=number // 2, **more)


FIRSTS = [a_trial(0, value=60.0), a_trial(1, changed=BF16, knobs=BF16, value=90.0)]


def test_rounds_in_which_the_machine_was_disturbed_do_not_refute_the_claim():
    """Exit code 4 said that the claim no longer holds, although other programs had disturbed the trials."""
    disturbed = [in_turn(number, 1, None, outcome=Outcome.disturbed, reason="other programs took 3 cores") for number in (2, 4)]
    decision = Decision(reason="no round could be completed: disturbed: other programs took 3 cores")
    found = summarised([*FIRSTS, *disturbed], decision)
    assert (found["verdict"], found["now"]) == ("ambiguous", None)
    failed = [in_turn(number, 1, None, outcome=Outcome.error, reason="boom") for number in (2, 4)]
    assert summarised([*FIRSTS, *failed], decision)["verdict"] == "no longer holds"
    stopped = in_turn(6, 1, None, outcome=Outcome.interrupted, reason="stopped by the user")
    assert summarised([*FIRSTS, stopped, *failed], decision)["verdict"] == "no longer holds"


def test_program_that_does_not_train_does_not_refute_the_claim(verified):
    crash = Failure(error={"type": "RuntimeError", "message": "no data", "traceback": ""})
    with pytest.raises(NothingWorked, match="no data"):
        verified(Surface(failures=lambda *_: crash)).run()


@pytest.mark.parametrize("takes_s", [1.0, 20.0, 90.0])
def test_long_wait_for_the_copy_in_mlflow_is_announced_on_standard_error(bench, takes_s, capsys):
    class Tracking:
        waited_s = 0.0

        def wait(self, timeout):
            self.waited_s += min(timeout, takes_s - self.waited_s)
            if self.waited_s < takes_s:
                raise subprocess.TimeoutExpired("sync", timeout)
            return 0

        def terminate(self):
            pass

        def hurry(self):
            pass

    tracking, wanted = Tracking(), Verify(claim=claim(), rounds=2, minutes=10.0, long_minutes=None)
    study = bench(FASTER, "study.budget.minutes=null", "search_space=quick", verify=wanted, start_tracking=lambda _: tracking)
    study.inputs.space.domains.clear()
    run_study(study.inputs, study.folder, View())
    assert tracking.waited_s == min(takes_s, 60.0)
    said = "autotune: waiting for the copy in MLflow, for at most 57 s more; Ctrl-C skips it\n"
    assert capsys.readouterr().err == (said if takes_s > 3 else "")


def test_rounds_that_do_not_fit_are_not_started_but_two_are_always_measured(verified):
    study = verified(rounds=20, minutes=1.0)
    found = study.run()["verification"]
    assert 2 <= found["now"]["num_rounds"] < 8
    assert any("of 20 rounds fit into 1 min" in line for line in study.listener.named("notice"))
    assert not any("At least 2 rounds" in line for line in study.listener.named("notice"))
    study = verified(rounds=20, minutes=0.1)
    assert study.run()["verification"]["now"]["num_rounds"] == 2
    (told,) = [line for line in study.listener.named("notice") if "always run" in line]
    assert told.startswith("At least 2 rounds always run, and they do not fit into 0.1 min: they take about ")


def test_a_small_gain_in_noise_is_ambiguous_and_says_so(verified):
    noisy = Surface(gains={("precision.amp", "bf16"): 1.02}, noise_frac=0.05, loader_per_s=1e6)
    found = verified(noisy, claim(Ratio(ratio=1.02, ci=(1.01, 1.03), num_rounds=8))).run()["verification"]
    assert found["verdict"] == "ambiguous"
    assert found["reason"].startswith("undecided after 4 rounds")


def test_long_runs_measure_each_side_once_and_report_the_achieved_rate(verified):
    of = claim(baseline=Rate(value=60.0), best=Rate(value=90.0))
    study = verified(of=of, rounds=2, long_minutes=2.0)
    found = study.run()["verification"]["long"]
    runs = [trial for trial in study.trials if trial.why == LONG]
    assert [trial.repeats for trial in runs] == [0, 1]
    rules = study.launcher.launches[-1].spec.rules
    assert (rules.min_s, rules.max_s, rules.slow_max_s) == (120.0, 120.0, 120.0)
    assert found["best"]["claimed"] == 90.0
    assert found["best"]["achieved"] == pytest.approx(90.0, rel=0.05)


def test_claim_about_another_objective_is_also_compared_in_rates(verified):
    of = claim(baseline=Rate(value=60.0), best=Rate(value=90.0))
    terms = ("objective=cost_per_epoch", "machine.price_per_hour=2", "study.samples=1e6")
    found = verified(FASTER, of, *terms, rounds=2, long_minutes=2.0).run()["verification"]
    for side, rate in (("baseline", 60.0), ("best", 90.0)):
        assert found["now"][side]["value"] == pytest.approx(rate, rel=0.05)
        assert found["long"][side]["short"] == pytest.approx(rate, rel=0.05)


def test_settings_that_the_program_now_has_itself_are_reported_as_differences(verified):
    surface = Surface(**{**vars(FASTER), "observed": {**FASTER.observed, "precision.amp": "bf16"}})
    found = verified(surface, claim(changed={**BF16, "loader.num_workers": 2})).run()["verification"]
    assert "precision.amp: the program has bf16 already" in found["differences"]
    assert not any("num_workers" in phrase for phrase in found["differences"])
    same = verified(surface)
    found = same.run()["verification"]
    assert (found["verdict"], len(same.trials)) == ("ambiguous", 2)
    assert "already runs with all of the file's settings" in found["reason"]


def test_settings_without_effect_here_are_reported_as_differences(verified):
    found = verified(of=claim(changed={**BF16, "loader.prefetch_factor": 8})).run()["verification"]
    assert found["verdict"] == "holds"
    assert "loader.prefetch_factor: has no effect with the program's other settings" in found["differences"]
    found = verified(of=claim(changed={"loader.prefetch_factor": 8})).run()["verification"]
    assert found["reason"] == "none of the file's settings changes anything here, so there is nothing to compare"


def test_accumulation_that_follows_from_the_global_batch_is_no_difference():
    """It said "the program has 2 already", although the program accumulates 4 batches and the file's configuration 2."""
    changed = {"loader.batch_size": 64, "step.accumulation": 2}
    best = a_trial(1, changed={"loader.batch_size": 64}, knobs=changed, value=90.0)
    held = {"train.global_batch": 128}
    assert summarised([FIRSTS[0], best], None, claim(changed=changed), **held)["differences"] == []
    assert summarised([FIRSTS[0], best], None, claim(changed=changed))["differences"] != []


def test_pinned_knobs_of_the_file_apply_to_both_sides(verified):
    study = verified()
    study.inputs.space.pinned["loader.batch_size"] = 64
    study.run()
    assert {launch.spec.knobs["loader.batch_size"] for launch in study.launcher.launches} == {64}
    assert [launch.spec.knobs.get("precision.amp") for launch in study.launcher.launches[:2]] == [None, "bf16"]


def test_interrupted_verification_resumes_and_repeats_nothing(verified):
    stops = Surface(**{**vars(FASTER), "failures": lambda trial, _: Failure(raises=KeyboardInterrupt) if trial == 4 else None})
    study = verified(stops)
    assert study.run()["status"] == "interrupted"
    before = [trial.number for trial in study.trials if trial.value is not None]
    study.surface.failures = lambda *_: None
    summary = resume_study(study.inputs, study.folder, study.listener)
    assert summary["verification"]["verdict"] == "holds"
    assert summary["verification"]["now"]["num_rounds"] == 4
    assert [trial.number for trial in study.trials if trial.value is not None][: len(before)] == before
    assert sum(1 for trial in study.trials if str(trial.kind) == "search") == 1


def test_differences_from_the_environment_of_the_claim_are_listed():
    made_with = {
        "machine.gpus": ["H200"],
        "machine.cpu_model": "A",
        "machine.isa": ["avx2"],
        "program.torch": "2.9",
        "program.device_name": None,
    }
    now = {
        "machine.gpus": [],
        "machine.cpu_model": "B",
        "machine.isa": ["avx2"],
        "program.torch": "2.14",
        "program.device_name": "H200",
        "x": 1,
    }
    found = differences(claim(identity=made_with), now)
    assert found == ["cpu_model: A there, B here", "gpus: H200 there, none here", "torch: 2.9 there, 2.14 here"]


def test_claim_is_unchanged_after_json():
    wanted = Verify(claim=claim(best=Rate(value=1.0, ci=(0.9, 1.1)), command=["a"]), rounds=4, minutes=5.0, long_minutes=None)
    assert Verify.from_json(dataclasses.asdict(wanted)) == wanted
    with pytest.raises(ValueError, match="not a claim"):
        Verify.from_json({"rounds": 3})
