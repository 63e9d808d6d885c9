import collections

import numpy as np
import pytest

from autotune.cli.verdict import lines
from autotune.compare.decision import Decision, choose, failed_finalists, finalists, judge, without_finalist
from autotune.compare.tiers import TIERS, leader
from autotune.harness.protocol import MeasureRules
from autotune.records import CHOOSING, REPORTED, Kind, Outcome, Tier
from autotune.stats import Noise, Ratio, log_mean_interval
from autotune.study import resume_study
from autotune.trials.budget import closing_s
from autotune.trials.health import ACCEPTED
from tests.explain import made
from tests.stats.simulated import Machine, Study
from tests.support.fake_launcher import OUT_OF_MEMORY, Failure, Surface
from tests.support.records import a_trial


def trial(number, value, outcome=Outcome.ok, **changed):
    changed = {f"env.{key}": text for key, text in changed.items()}
    return a_trial(number, changed=changed, outcome=outcome, value=value)


BASELINE = trial(0, 100.0)


def test_finalists_are_the_three_best_that_may_win():
    searched = [trial(n, 150.0 + n, A=str(n)) for n in range(1, 6)]
    searched.append(trial(9, 999.0, Outcome.unsteady, A="9"))
    assert [record.number for record in finalists([BASELINE, *searched])] == [5, 4, 3]


def test_trial_far_behind_the_best_is_not_a_finalist():
    assert [record.number for record in finalists([BASELINE, trial(1, 200.0, A="1"), trial(2, 120.0, A="2")])] == [1]


def test_there_is_no_finalist_if_no_trial_comes_near_the_baseline():
    assert finalists([BASELINE, trial(1, 90.0, A="1"), trial(2, None, Outcome.crash, A="2")]) == []
    assert finalists([BASELINE]) == []


def test_equally_fast_superset_is_the_last_finalist_and_only_if_a_place_is_free():
    """Single measurements do not show that fewer changes are as fast as all of them."""
    few, many, better = trial(1, 200.0, A="1"), trial(2, 201.0, A="1", B="1"), trial(3, 210.0, A="1", C="1")
    assert [record.number for record in finalists([BASELINE, few, many, better])] == [3, 1, 2]
    other = trial(4, 205.0, D="1")
    assert [record.number for record in finalists([BASELINE, few, many, better, other])] == [3, 4, 1]


def test_superset_clearly_slower_than_its_subset_is_not_a_finalist():
    few, many = trial(1, 200.0, A="1"), trial(2, 188.0, A="1", B="1")
    assert [record.number for record in finalists([BASELINE, few, many])] == [1]


def test_compilation_without_a_gain_is_not_a_finalist():
    few, compiled = trial(1, 200.0, A="1"), trial(2, 204.0, A="1", B="1")
    compiled.phases_s["compile"] = 60.0
    assert [record.number for record in finalists([BASELINE, few, compiled])] == [1]
    compiled.value = 207.0
    assert [record.number for record in finalists([BASELINE, few, compiled])] == [2, 1]


def test_among_equally_fast_finalists_the_one_with_fewest_changes_is_chosen():
    many, few, slow = trial(1, 200.0, A="1", B="1"), trial(2, 199.0, A="1"), trial(3, 180.0)
    assert choose({1: [200.0], 2: [199.5], 3: [180.0]}, [many, few, slow]) is few
    assert choose({1: [200.0], 2: [190.0]}, [many, few]) is many
    assert choose({}, [many, few]) is few


def test_value_from_the_search_does_not_beat_values_from_rounds():
    lucky, measured = trial(1, 230.0, A="1"), trial(2, 220.0, A="2")
    assert choose({2: [200.0]}, [lucky, measured]) is measured


def test_lower_tier_is_chosen_if_the_number_of_changes_is_equal():
    exact, training = trial(1, 200.0, A="1"), trial(2, 200.5, A="2")
    training.tier = Tier.training
    assert choose({}, [training, exact]) is exact


@pytest.mark.parametrize(
    ("ratio", "ci", "verdict", "is_likely", "is_better"),
    [
        (1.5, (1.4, 1.6), "faster", True, True),
        (1.0, (0.995, 1.005), "same", False, False),
        (1.1, (0.995, 1.2), "ambiguous", True, True),
        (1.1, (0.995, 1.2), "ambiguous", False, False),
        (1.008, (0.995, 1.015), "ambiguous", True, False),
        (1.3, None, "ambiguous", None, True),
        (1.1, None, "ambiguous", None, False),
        (1.1, None, "ambiguous", True, True),
        (1.3, None, "ambiguous", False, False),
        (0.9, (0.85, 0.95), "ambiguous", False, False),
    ],
)
def test_decision_is_better_only_if_a_worthwhile_gain_is_likely(ratio, ci, verdict, is_likely, is_better):
    found = Ratio(ratio=ratio, ci=ci, num_rounds=3)
    assert Decision(finalist=BASELINE, ratio=found, verdict=verdict, is_likely=is_likely).is_better is is_better


@pytest.mark.parametrize(
    ("pairs", "choosing", "is_likely"),
    [
        ([(1075.0, 700.0), (830.0, 733.0)], [], False),  # two pairs give an interval from 0.19 to 9
        ([(1075.0, 700.0), (830.0, 733.0)], [{0: 727.0, 1: 1098.0, 2: 821.0}, {0: 700.0, 1: 1027.0, 2: 847.0}], True),
        ([(830.0, 700.0), (700.0, 733.0)], [{0: 727.0, 1: 720.0, 2: 821.0}, {0: 700.0, 1: 727.0, 2: 847.0}], False),
        ([(1.1, 1.0), (1.05, 1.0), (1.2, 1.0), (1.01, 1.0)], [], True),
        ([(1.2, 1.0)], [], None),
        ([(1.2, 1.0)], [{0: 1.0, 1: 0.9}, {0: 1.0, 1: 0.9}], False),
        ([(1.12, 1.0)], [{0: 1.0, 1: 1.1}, {0: 1.0, 1: 1.14}], True),
    ],
)
def test_choosing_rounds_affect_what_is_exported_but_not_the_reported_speedup(pairs, choosing, is_likely):
    found, alone = judge(trial(1, 200.0, A="1"), pairs, choosing=choosing), judge(trial(1, 200.0, A="1"), pairs)
    assert found.is_likely is is_likely
    assert (found.ratio, found.verdict) == (alone.ratio, alone.verdict)
    assert ("still exported" in found.reason) is (found.is_better and found.verdict == "ambiguous")


def test_verdict_reports_lost_rounds():
    found = judge(trial(1, 150.0), [(150.0, 100.0)] * 3 + [(151.0, 100.0)], num_lost=2)
    assert found.verdict == "faster"
    assert found.reason == "2 rounds of the finals do not count, because a trial failed or was disturbed"


def test_interval_widens_if_the_verdict_is_judged_twice():
    pairs = [(101.0, 100.0), (102.0, 100.0), (103.0, 100.0)]
    once, twice = (judge(trial(1, 150.0), pairs, looks=looks).ratio.ci for looks in (1, 2))
    assert twice[0] < once[0] < once[1] < twice[1]


def test_interval_of_a_rate_uses_the_spread_of_finalist_baseline_and_other_rounds():
    pairs = [(150.0, 100.0), (153.0, 101.0)]
    _, alone = log_mean_interval([150.0, 153.0])
    rate, both = judge(trial(1, 150.0), pairs).rate(1)
    _, known = judge(trial(1, 150.0), pairs, noise=Noise(spread=0.015, freedom=10)).rate(1)
    assert rate == pytest.approx((150.0 * 153.0) ** 0.5)
    assert known[1] - known[0] < both[1] - both[0] < alone[1] - alone[0]
    assert known[0] < 150.0 < 153.0 < known[1]


def test_batch_size_is_changed_only_if_its_gain_exceeds_the_spread():
    """A batch size changes the training. So if no difference is shown, the configuration with the program's batch size wins."""
    batch, same = trial(1, 210.0, B="16"), trial(2, 203.0, A="1", C="1")
    batch.tier, same.tier = Tier.training, Tier.numerics
    rates = {1: [210.0], 2: [203.0]}
    assert choose(rates, [batch, same]) is batch
    assert choose(rates, [batch, same], spread=0.05) is same
    assert choose({1: [260.0], 2: [203.0]}, [batch, same], spread=0.05) is batch


def test_best_configuration_with_unchanged_training_is_a_finalist():
    searched = [trial(n, 200.0 - n, B=str(n)) for n in range(1, 5)]
    for record in searched:
        record.tier = Tier.training
    same = trial(7, 190.0, A="1")
    same.tier = Tier.numerics
    assert [record.number for record in finalists([BASELINE, *searched, same])] == [1, 2, 7]
    same.value = 120.0  # so much slower that changing the training pays
    assert [record.number for record in finalists([BASELINE, *searched, same])] == [1, 2, 3]


def test_finals_end_if_a_finalist_fails_when_no_time_is_left(bench):
    """Without time for another pair, no other finalist can be chosen. The finals used to loop endlessly."""
    failures = lambda number, knobs: Failure(signal="SIGSEGV") if number >= 6 and knobs.get("precision.amp") == "bf16" else None  # noqa: E731
    surface = Surface(gains={("precision.amp", "bf16"): 2.0}, start_s=12.0, failures=failures)
    failed = []
    for minutes in (2.0, 2.5, 3.0, 3.5):
        study = bench(surface, "precision.amp=choice('off','bf16')", "search_space=none", minutes=minutes, seed=1)
        assert study.run()["status"] == "complete"
        failed += [one for one in study.trials if one.kind is Kind.final and one.outcome is Outcome.crash]
    assert failed


@pytest.mark.thorough
def test_third_pair_is_measured_before_explaining_if_it_fits(bench, tiny):
    """The finals are planned with trials of 12 s, which then take 18 s, as on a machine that slows down."""
    documents = lambda which, _: [made.lines(made.line("sum(x)", 0.02))] if which == "lines" else []  # noqa: E731
    short = []
    for minutes in (twentieths / 20 for twentieths in range(50, 66)):
        surface = Surface(
            gains={("precision.amp", "bf16"): 1.3}, start_s=9.0, window_s=3.0, noise_frac=0.1, documents=documents
        )
        study = bench(surface, "explain.auto=true", *tiny, minutes=minutes)
        study.listener.finals_started = lambda *_, surface=surface: setattr(surface, "start_s", 15.0)
        rounds = study.run()["speedup"].get("num_rounds")
        finals = [one.seconds for one in study.trials if one.kind is Kind.final]
        others_s = sum(one.seconds for one in study.trials if one.kind is not Kind.explain)
        spare_s = 60 * minutes - closing_s(60 * minutes) - others_s
        if rounds and rounds < 3 and spare_s > 2 * max(finals) + 1:
            short.append((minutes, rounds, spare_s))
    assert short == []


CLOSE = {("layout.channels_last", True): 1.9, ("optimizer.implementation", "fused"): 1.02, ("threads.intra", 4): 1.03}


EAGER = ("compile.mode=off",)


def finals_of(study):
    return [record for record in study.trials if record.kind is Kind.final]


def test_reporting_rounds_follow_choosing_rounds_and_alternate_abba_or_baab(bench):
    study = bench(Surface(gains=CLOSE, start_s=1.0, window_s=3.0), "study.budget.trials=12", *EAGER, minutes=10)
    summary = study.run()
    finals = finals_of(study)
    choosing = [record for record in finals if "choosing" in record.why]
    reported = [record for record in finals if "reported" in record.why]
    assert choosing
    assert max(record.round for record in choosing) < min(record.round for record in reported)
    best = summary["best"]["trial"]
    values = [record.value for record in reported if record.repeats == best]
    assert min(values) < summary["best"]["value"] < max(values)
    assert len(values) == summary["speedup"]["num_rounds"] == 8
    measured = [record.repeats for record in reported]
    assert len(measured) == 16
    for start in range(0, 16, 4):
        a, b, c, d = measured[start : start + 4]
        assert (a, b) == (d, c)
        assert a != b


def test_every_final_is_a_fresh_measurement_of_an_earlier_trial(bench):
    study = bench(Surface(gains=CLOSE), "study.budget.trials=5")
    study.run()
    trials = study.trials
    assert len(finals_of(study)) > 2
    for record in finals_of(study):
        assert record.changed == trials[record.repeats].changed
        assert record.origin == ""


def test_finals_use_stricter_measurement_rules_than_the_search(bench):
    study = bench(Surface(gains=CLOSE), "study.budget.trials=3")
    study.run()
    first, last = study.launcher.launches[0].spec.rules, study.launcher.launches[-1].spec.rules
    assert last.half_width_frac < first.half_width_frac


def test_finalist_that_fails_when_measured_again_is_replaced(bench):
    def failures(number, knobs):
        is_final = any(line[0] == "finals_started" for line in study.listener.calls)
        return Failure(signal="SIGSEGV", cause="exit") if is_final and knobs["threads.intra"] == 4 else None

    study = bench(
        Surface(gains=CLOSE, failures=failures, start_s=2.0, window_s=3.0), "study.budget.trials=14", *EAGER, minutes=12
    )
    summary = study.run()
    assert [one.outcome for one in finals_of(study) if one.changed.get("threads.intra") == 4][:1] == [Outcome.crash]
    assert summary["best"]["knobs"]["threads.intra"] != 4
    assert summary["speedup"]["verdict"] == "faster"


OPTIMIZER = "optimizer.implementation"
TWO_FAST = ["search_space=none", f"{OPTIMIZER}=choice('default','foreach','fused')", "study.budget.minutes=null"]


def two_fast(bench, *failing):
    """Returns a study with two finalists. (optimizer, n) in `failing`: the n-th final of the optimizer fails; n = -1: all."""
    num = collections.Counter()

    def failures(number, knobs):
        if any(line[0] == "finals_started" for line in study.listener.calls):
            num[knobs[OPTIMIZER]] += 1
        told = {(knobs[OPTIMIZER], num[knobs[OPTIMIZER]]), (knobs[OPTIMIZER], -1)}
        return Failure(signal="SIGSEGV", cause="exit") if num and told & set(failing) else None

    gains = {(OPTIMIZER, "foreach"): 1.3, (OPTIMIZER, "fused"): 1.4}
    study = bench(Surface(gains=gains, loader_per_s=1e6, start_s=2.0, window_s=3.0, failures=failures), *TWO_FAST)
    return study  # a variable, because `failures` looks at the study's listener


def again(study):
    """Resumes a finished study, and returns its summary."""
    study.launcher.launches.clear()
    return resume_study(study.inputs, study.folder, study.listener)


def test_a_resumed_study_keeps_the_finalist_that_was_chosen_after_another_failed(bench):
    study = two_fast(bench, ("fused", 3), ("fused", 4), ("foreach", 6))
    before = study.run()
    assert (before["best"]["overrides"], before["speedup"]["verdict"]) == ({OPTIMIZER: "foreach"}, "faster")
    after = again(study)
    assert not study.launcher.launches
    for part in ("best", "speedup", "best_by_tier", "failed_finalists"):
        assert after[part] == before[part]


def test_resumed_study_excludes_rounds_after_the_verdict_from_the_verdict(bench):
    budget = ["study.budget.minutes=null", "study.budget.trials=6"]
    study = bench(Surface(gains={("precision.amp", "bf16"): 1.4}, noise_frac=0.02), *EAGER, *budget)
    before = study.run()
    assert any(record.why == "finals, best of a tier" for record in finals_of(study))
    after = again(study)
    assert not study.launcher.launches
    assert (after["speedup"], after["best_by_tier"]) == (before["speedup"], before["best_by_tier"])


def test_rounds_of_a_tier_stay_pairs_after_a_lost_round(bench):
    """The rounds after a lost one had two numbers each, so that a resumed study paired trials of different rounds."""

    def failures(number, knobs):
        whys = [why for *_, why in study.listener.named("trial_started")]
        return Failure(signal="SIGSEGV", cause="exit") if whys[-1] == TIERS and whys.count(TIERS) == 1 else None

    surface = Surface(gains={("precision.amp", "bf16"): 1.4}, noise_frac=0.02, failures=failures)
    study = bench(surface, *EAGER, "study.budget.minutes=null", "study.budget.trials=6")
    study.run()
    rounds = collections.defaultdict(set)
    for record in finals_of(study):
        if record.why == TIERS:
            rounds[record.round].add(record.repeats)
    assert [len(measured) for measured in rounds.values()][:3] == [1, 2, 2]


def test_resumed_study_still_reports_that_every_finalist_failed(bench):
    study = two_fast(bench, ("fused", -1), ("foreach", -1))
    before = study.run()
    assert before["speedup"]["reason"] == "every finalist failed when it was measured again"
    assert again(study)["speedup"] == before["speedup"]


def test_resumed_study_attributes_the_winner_not_a_finalist_with_more_changes(bench):
    space = [
        f"{key}=choice({values})" for key, values in (("precision.amp", "'off','bf16'"), ("layout.channels_last", "false,true"))
    ]
    given = ["search_space=none", f"{OPTIMIZER}=choice('default','foreach')", *space, "search.sampler=grid"]
    gains = {("precision.amp", "bf16"): 1.4, ("layout.channels_last", True): 1.2}
    study = bench(Surface(gains=gains, noise_frac=0.002), *given, "study.budget.minutes=null")
    before = study.run()
    assert len(before["attribution"]) == 2
    after = again(study)
    assert (after["attribution"], after["minimality"]) == (before["attribution"], before["minimality"])


def test_resumed_study_does_not_repeat_lost_rounds(bench):
    study = two_fast(bench, *[("default", number) for number in range(3, 14)])
    before = study.run()
    assert before["speedup"]["num_rounds"] < 8
    assert again(study)["speedup"] == before["speedup"]
    assert not study.launcher.launches


def test_no_reporting_round_runs_if_every_finalist_fails_in_each_choosing_round(bench):
    study = two_fast(bench, ("foreach", 1), ("foreach", 2), ("fused", 1), ("fused", 2))
    before = study.run()
    assert before["speedup"]["reason"] == "every finalist failed when it was measured again"
    assert before["best"]["overrides"] == {}
    assert {record.why for record in finals_of(study)} == {CHOOSING}
    assert again(study)["speedup"] == before["speedup"]


def test_finals_end_even_if_the_baseline_always_fails_in_them(bench):
    """Without a time budget, the finals used to loop endlessly."""
    study = two_fast(bench, ("default", -1), ("fused", 1), ("foreach", 1))
    assert study.run()["status"] == "complete"
    assert len(finals_of(study)) < 60


def test_finalist_that_failed_in_the_finals_is_reported_if_nothing_else_is_faster(bench):
    def failures(number, knobs):
        is_final = any(line[0] == "finals_started" for line in study.listener.calls)
        return OUT_OF_MEMORY if is_final and knobs["precision.amp"] == "bf16" else None

    space = ["search_space=none", "precision.amp=choice('off','bf16')", "optimizer.implementation=choice('default','foreach')"]
    gains = {("precision.amp", "bf16"): 1.15}
    study = bench(Surface(gains=gains, loader_per_s=1e6, start_s=2.0, window_s=3.0, failures=failures), *space, minutes=20)
    summary = study.run()
    assert summary["best"]["overrides"] == {}
    assert summary["speedup"]["verdict"] == "same"
    failed = summary["failed_finalists"]
    assert failed
    assert all(entry["overrides"]["precision.amp"] == "bf16" for entry in failed)
    assert all(entry["outcome"] == "device_oom" and 1.1 < entry["ratio"] < 1.2 for entry in failed)
    assert all("precision.amp" not in entry["overrides"] for entry in summary["best_by_tier"].values())
    text = f"Faster in the search, but failed when checked again: trial {failed[0]['trial']}, "
    assert any(line.startswith(f"note  {text}") and "device_oom" in line for line in lines(summary, study.folder.path))


def test_failed_finalists_include_failed_parity_but_not_reported_or_slower_trials():
    reported, faster, slower = trial(1, 150.0, A="1"), trial(2, 200.0, A="2"), trial(3, 90.0, A="3")
    again = [
        a_trial(4 + n, kind=kind, outcome=outcome, repeats=number)
        for n, (kind, outcome, number) in enumerate(
            [
                (Kind.final, Outcome.crash, 1),
                (Kind.parity, Outcome.parity, 2),
                (Kind.final, Outcome.timeout, 3),
                (Kind.final, Outcome.disturbed, 2),
            ]
        )
    ]
    records, ratio = [BASELINE, reported, faster, slower, *again], Ratio(ratio=1.0, ci=(0.99, 1.01), num_rounds=5)
    assert failed_finalists(records, Decision(finalist=reported, ratio=ratio, verdict="same")) == [(faster, again[1])]
    assert failed_finalists(records, Decision()) == [(faster, again[1]), (reported, again[0])]


def test_best_of_a_tier_is_never_a_configuration_that_failed_in_the_finals():
    slow, again, other = trial(1, 120.0, A="1"), trial(5, 150.0, A="1"), trial(2, 110.0, B="1")
    failed = a_trial(6, kind=Kind.final, changed=again.changed, outcome=Outcome.crash, repeats=5)
    records = [BASELINE, slow, other, again]
    assert leader(records, BASELINE, Tier.exact) is again
    assert leader([*records, failed], BASELINE, Tier.exact) is other


@pytest.mark.parametrize("before", [(1, 0), (2, 0, 1), (1, 2)])
def test_leader_that_a_cut_off_choosing_round_lacks_may_still_be_chosen(before):
    """A resumed study without time for another round chose among the candidates that the round had measured."""
    study = Study([100.0, 130.0, 135.0, 140.0], Machine(np.random.default_rng(0), 0.001), seconds=110.0 + 10.0 * len(before))
    for number in before:
        study.measure_again(study.records[number], round_number=1, rules=MeasureRules(), why=CHOOSING)
    assert study.finals().finalist.number == 3


def test_search_rates_from_before_an_accepted_disturbance_do_not_choose_the_winner():
    """The slower candidate was chosen, because the search had measured it before another program began to use the machine."""
    study = Study([100.0, 140.0, 148.0], Machine(np.random.default_rng(0), 0.001))
    study.records[2].value *= 0.82
    study.records[2].evidence[ACCEPTED] = {"cpu": 1.0}
    assert study.finals().finalist.number == 2


@pytest.mark.parametrize("before", [(1, 0), (0, 1)])
def test_first_pair_after_a_resume_reverses_the_order_of_the_last_pair(before):
    study = Study([100.0, 140.0], Machine(np.random.default_rng(0), 0.01))
    for number in before:
        study.measure_again(study.records[number], round_number=1, rules=MeasureRules(), why=REPORTED)
    study.finals()
    assert [record.repeats for record in study.records[4:6]] == list(before[::-1])


def test_verdict_is_ambiguous_if_every_trial_failed():
    failed = [trial(number, None, Outcome.error, a=str(number)) for number in (1, 2)]
    decision = without_finalist([trial(0, 10.0), *failed])
    assert (decision.verdict, decision.reason) == ("ambiguous", "none of the configurations tried could be measured: error")
