import pytest

from autotune.clock import VirtualClock
from autotune.harness.protocol import MeasureRules
from autotune.records import Outcome
from autotune.trials.budget import CACHED_FRAC, CLOSING_MAX_S, COMPILE_S, Budget, Costs, finals_rules
from tests.support.records import a_trial


def trial(seconds, batch=32, *, start_s=4.0, steady_s=6.0, outcome=Outcome.ok, **changed):
    changed = {key.replace("__", "."): value for key, value in changed.items()}
    knobs, phases_s = {"loader.batch_size": batch, **changed}, {"spawn": start_s, "steady": steady_s}
    return a_trial(1, knobs=knobs, changed=changed, outcome=outcome, value=1.0, seconds=seconds, phases_s=phases_s)


def budget(total_s=480.0, **more):
    return Budget(clock=VirtualClock(), total_s=total_s, **more)


def test_finals_reserve_over_a_third_of_the_time_for_slow_programs_and_less_for_fast():
    slow, cheap = budget(), budget()
    slow.reserve(trial(25.0, steady_s=12.0))
    cheap.reserve(trial(3.0, steady_s=2.5))
    assert 0.35 <= (slow.reserved_s - slow.attribution_s) / 480 <= 0.40
    assert (cheap.reserved_s - cheap.attribution_s) / 480 < 0.30
    assert slow.attribution_s < 0.7 * 0.18 * 480, "three trials could measure hardly any effect"
    assert 0 < cheap.attribution_s / 480 <= 0.18
    assert slow.search_left_s == 480 - CLOSING_MAX_S - slow.reserved_s


def test_without_a_budget_in_minutes_time_is_unlimited_and_nothing_is_reserved():
    unlimited = budget(None)
    unlimited.reserve(trial(25.0))
    assert unlimited.left_s == unlimited.search_left_s == float("inf")
    assert unlimited.fits(1e9, again_s=1e9)
    assert not unlimited.is_time_for_late(1000, [20.0] * 4)


def test_time_kept_for_explaining_is_freed_only_as_far_as_needed():
    kept = budget(100.0, explain_s=10.0)
    left_s = kept.left_s
    assert kept.take_from_passes(left_s - 1.0)
    assert (kept.explain_s, kept.left_s) == (10.0, left_s)
    assert kept.take_from_passes(left_s + 4.0)
    assert (kept.explain_s, kept.left_s) == (6.0, left_s + 4.0)
    assert not kept.take_from_passes(left_s + 11.0)
    assert kept.explain_s == 6.0


def test_late_proposals_are_due_after_two_thirds_of_time_or_trials():
    timed, counted = budget(), budget(None, max_trials=20)
    late_s = [20.0] * 4
    assert not timed.is_time_for_late(3, late_s)
    timed.clock.sleep(480 * 0.66)
    assert timed.is_time_for_late(3, late_s)
    assert not counted.is_time_for_late(12, late_s)
    assert counted.is_time_for_late(13, late_s)
    assert budget(None, max_trials=6).is_time_for_late(2, late_s), "four late proposals must still fit"


def test_late_proposals_are_due_earlier_if_they_are_expensive():
    dear = budget()
    dear.clock.sleep(480 * 0.51)
    assert not dear.is_time_for_late(3, [20.0])
    assert dear.is_time_for_late(3, [120.0, 120.0])
    assert not budget().is_time_for_late(3, [1000.0]), "half of the search is kept for a good configuration"


def test_trial_does_not_fit_if_the_finals_could_not_repeat_it():
    held = budget()
    held.reserve(trial(20.0))
    assert held.fits(60.0, again_s=40.0)
    assert not held.fits(60.0, again_s=100.0)
    assert not held.fits(400.0, again_s=10.0)


def test_first_trial_may_use_all_time_except_one_pair_of_the_finals():
    held = budget()
    held.reserve(trial(100.0, start_s=90.0))
    assert not held.fits(120.0, again_s=120.0)
    assert held.fits(120.0, again_s=120.0, has_finalist=False)
    assert not held.fits(180.0, again_s=180.0, has_finalist=False)
    assert held.needed_s(180.0, again_s=180.0) == 600


def test_cost_is_learned_from_the_nearest_batch_size():
    costs = Costs({})
    assert costs.expected_s({"loader.batch_size": 32}, {}) == 0.0
    costs.learn(trial(10.0, 32))
    assert costs.expected_s({"loader.batch_size": 32}, {}) == 10.0
    assert costs.expected_s({"loader.batch_size": 64}, {}) == pytest.approx(4 + 6 * 2)
    for _ in range(3):
        costs.learn(trial(11.0, 64))
    assert costs.expected_s({"loader.batch_size": 64}, {}) == 11.0


def test_failed_trials_do_not_change_the_expected_cost():
    costs = Costs({})
    costs.learn(trial(10.0))
    costs.learn(trial(300.0, outcome=Outcome.timeout))
    assert costs.expected_s({"loader.batch_size": 32}, {}) == 10.0


def test_compile_time_is_guessed_until_it_was_measured():
    costs = Costs({"compile.mode": {"max-autotune": 4.0}})
    costs.learn(trial(10.0))
    knobs, changed = {"loader.batch_size": 32}, {"compile.mode": "default"}
    assert costs.expected_s(knobs, changed) == 10 + COMPILE_S
    assert costs.again_s(knobs, changed) < costs.expected_s(knobs, changed)
    costs.learn(trial(35.0, compile__mode="default"))
    assert costs.expected_s({"loader.batch_size": 16}, changed) == 35.0
    assert costs.expected_s(knobs, {"compile.mode": "max-autotune"}) == 10.0 + 4 * 25.0, "guessed from `default`"
    assert costs.expected_s(knobs, {}) == 10.0


def test_what_a_trial_has_compiled_is_expected_in_the_cache_unless_the_graphs_differ():
    costs = Costs({"compile.mode": {"max-autotune": 4.0}})
    compiled = {"compile.mode": "default"}
    costs.learn(trial(10.0))
    costs.learn(trial(50.0, compile__mode="default"))
    cached_s = 10 + CACHED_FRAC * 40
    for changed in ({"loader.num_workers": 8}, {"loader.pin_memory": True, "optimizer.implementation": "fused"}):
        assert costs.expected_s({"loader.batch_size": 32, **changed}, {**compiled, **changed}) == cached_s
    for changed in ({"precision.amp": "bf16"}, {"loader.batch_size": 16}, {"compile.mode": "reduce-overhead"}):
        knobs = {"loader.batch_size": 32, **changed}
        assert costs.expected_s(knobs, {**compiled, **changed}) == 50.0
        assert costs.again_s(knobs, {**compiled, **changed}) <= cached_s


def test_trial_that_compiles_from_the_cache_does_not_make_compilations_look_cheap():
    """After such a trial, a study of ten minutes expected max-autotune to fit, and lost three minutes to its time limit."""
    costs = Costs({"compile.mode": {"max-autotune": 4.0}})
    costs.learn(trial(10.0))
    costs.learn(trial(50.0, compile__mode="default"))
    costs.learn(trial(13.0, compile__mode="default", loader__num_workers=8))
    assert costs.expected_s({"loader.batch_size": 32}, {"compile.mode": "max-autotune"}) == 10 + 4 * 40


def test_program_that_compiles_its_model_itself_is_repeated_from_the_cache():
    """With the baseline's 40 s of compilation in each round, the fastest configuration seemed too slow to be confirmed."""
    baseline, costs, held, other = trial(60.0), Costs({}), budget(), budget()
    baseline.phases_s["compile"] = 40.0
    costs.learn(baseline)
    assert costs.expected_s(baseline.knobs, {}) == 60.0, "another batch size is compiled anew"
    assert costs.again_s(baseline.knobs, {}) == pytest.approx(60 - (1 - CACHED_FRAC) * 40)
    held.reserve(baseline)
    other.reserve(trial(30.0))
    assert held.reserved_s == other.reserved_s


def test_expected_cost_of_repeating_a_trial_ignores_window_restarts():
    restarted, slow = trial(39.0, steady_s=26.0), trial(39.0, steady_s=26.0)
    restarted.metrics = {"window_s": 8.0, "window_steps": 40}
    slow.metrics = {"window_s": 24.0, "window_steps": 8}
    for record, expected_s in ((restarted, 13 + 5), (slow, 13 + 6 * 3)):
        costs = Costs({})
        costs.learn(record)
        assert costs.expected_s(record.knobs, {}) == 39.0
        assert costs.again_s(record.knobs, {}) == pytest.approx(expected_s)


def test_finals_windows_shrink_so_that_rounds_fit():
    rules = MeasureRules(half_width_frac=0.005, max_s=30.0, slow_max_s=20.0)
    tight = finals_rules(rules, seconds_each=12.0, baseline=trial(10.0, steady_s=6.0))
    assert tight.max_s == tight.slow_max_s == 8.0
    assert tight.half_width_frac == 0.005
    assert finals_rules(rules, seconds_each=500.0, baseline=trial(10.0)) == rules
    assert finals_rules(rules, seconds_each=1.0, baseline=trial(10.0)).max_s == 2 * rules.min_s


@pytest.mark.parametrize(("total_s", "most_s"), [(60.0, 15.0), (480.0, 60.0)])
def test_short_budget_limits_how_long_a_trial_waits_for_cycles(total_s, most_s):
    rules = Budget(clock=VirtualClock(), total_s=total_s).screening_rules(MeasureRules())
    assert (rules.cycles_max_s, rules.warmup_max_s) == (most_s, most_s)
