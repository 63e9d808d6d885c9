import random

import pytest

from autotune.trials.losses import Verdict, compare, exploded

FALLS = [2.0 - 0.03 * n for n in range(40)]


def scaled(curve, factor):
    return [loss * factor for loss in curve]


def drifts(curve, frac):
    """Returns a curve that starts like `curve` and is worse by `frac` at the end."""
    return [loss * (1 + frac * n / (len(curve) - 1)) for n, loss in enumerate(curve)]


def verdict(own, reference=FALLS, **options):
    return compare(own, reference, **{"tolerance_frac": 0.05, **options})


def test_similar_losses_pass_and_the_reason_states_the_numbers():
    found = verdict(drifts(FALLS, 0.005))
    assert found.verdict is Verdict.passed
    assert found.reason == "within 0.4 % of the baseline's loss over 40 steps"
    assert (found.num_steps, found.tolerance_frac) == (40, 0.05)
    assert found.difference_frac == pytest.approx(0.0044, abs=1e-3)


def test_worse_loss_fails_and_the_reason_states_both_levels_and_the_tolerance():
    found = verdict(drifts(FALLS, 1.0))
    assert found.verdict is Verdict.failed
    assert found.reason == "loss 1.818 against 0.965 after 40 steps: 85 % worse, tolerance 5 %"


def test_better_loss_passes_if_it_starts_the_same():
    found = verdict(drifts(FALLS, -0.3))
    assert found.verdict is Verdict.passed
    assert found.reason == "26 % below the baseline's loss over 40 steps"


def test_different_first_loss_fails_even_if_the_loss_is_lower():
    found = verdict([0.0] * 40)
    assert found.verdict is Verdict.failed
    assert found.reason == "weights and batch are the same, but the first loss is 0 against 2"


def test_nonfinite_loss_fails_if_the_baseline_loss_is_finite():
    assert verdict([2.0, None, *FALLS[2:]]).reason == "the loss is not finite at step 2, but the baseline's loss is"
    assert verdict([2.0, None, *FALLS[2:]]).verdict is Verdict.failed
    assert verdict(FALLS, reference=[None, *FALLS[1:]]).verdict is Verdict.unknown


def test_single_outlier_batch_does_not_decide():
    wild = [loss * (3 if n == 20 else 1) for n, loss in enumerate(FALLS)]
    assert verdict(wild).verdict is Verdict.passed


def test_difference_near_zero_is_relative_to_half_of_the_largest_baseline_loss():
    falls_to_nothing = [2.0 * 0.8**n for n in range(40)]
    passed = verdict([loss + 0.002 for loss in falls_to_nothing], reference=falls_to_nothing)
    assert passed.verdict is Verdict.passed
    assert "at the end, relative to half of " in passed.reason
    assert verdict([max(loss, 0.2) for loss in falls_to_nothing], reference=falls_to_nothing).verdict is Verdict.failed
    assert verdict([0.0] * 40, reference=[0.0] * 40).verdict is Verdict.passed


def test_outlier_batches_after_the_loss_came_near_zero_do_not_decide():
    gone = [6.7, 5.1, 2.1, 0.9, 0.4, *[0.01] * 25]
    jumps = [*gone[:24], 0.35, 0.01, 0.09, 0.01, 0.02, 0.99]  # as measured: resnet18 on photos under bf16
    assert verdict(jumps, reference=gone).verdict is Verdict.passed


def test_negative_loss_is_worse_if_it_is_higher():
    falls = [-1.0 - 0.1 * n for n in range(40)]
    assert verdict([-1.0 - 0.05 * n for n in range(40)], reference=falls).verdict is Verdict.failed
    assert verdict([-1.0 - 0.15 * n for n in range(40)], reference=falls).verdict is Verdict.passed


def test_only_steps_made_by_both_runs_are_compared():
    assert verdict(FALLS[:12]).num_steps == 12
    assert verdict(FALLS[:12]).verdict is Verdict.passed
    few = verdict(FALLS[:3])
    assert (few.verdict, few.reason) == (Verdict.unknown, "only 3 steps can be compared, at least 5 are needed")


def test_difference_within_the_spread_of_two_baseline_runs_passes():
    assert verdict(drifts(FALLS, 0.1), chance=drifts(FALLS, 0.07)).verdict is Verdict.passed
    assert verdict(drifts(FALLS, 0.1), chance=drifts(FALLS, 0.01)).verdict is Verdict.failed


def test_shorter_second_baseline_run_counts_over_the_steps_it_made():
    """A slow program runs for a limited time, and no two runs make the same number of steps."""
    assert verdict(drifts(FALLS, 0.1), chance=drifts(FALLS, 0.07)[:39]).verdict is Verdict.passed
    assert verdict(drifts(FALLS, 0.1), chance=drifts(FALLS, 0.01)[:39]).verdict is Verdict.failed


def test_very_noisy_baseline_gives_no_verdict_unless_the_loss_diverges():
    found = verdict(drifts(FALLS, 0.3), chance=drifts(FALLS, -0.3))
    assert found.verdict is Verdict.unknown
    assert "two runs of the baseline differ by 26 %" in found.reason
    assert verdict(scaled(drifts(FALLS, 3.0), 1.0), chance=drifts(FALLS, -0.3)).verdict is Verdict.failed


def test_batch_noise_common_to_both_runs_does_not_fail():
    random.seed(0)
    noisy = [loss * random.lognormvariate(0, 0.3) for loss in FALLS]
    rounded = [loss * random.lognormvariate(0, 0.02) for loss in noisy]
    assert verdict(rounded, reference=noisy).verdict is Verdict.passed


def test_exploding_loss_is_detected_unless_the_baseline_explodes_too():
    runs_away = [2.0 * 1.3**n for n in range(40)]
    assert exploded(runs_away, FALLS).startswith("the loss exploded: 2 at first, ")
    assert exploded(FALLS, FALLS) == ""
    assert exploded(runs_away, runs_away) == ""  # the baseline's loss explodes, too
    assert exploded([*FALLS[:10], 500.0, *FALLS[11:]], FALLS) == ""  # one bad batch
    assert exploded(runs_away, []) == ""
    assert exploded(runs_away[:4], FALLS) == ""
