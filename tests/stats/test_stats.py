import math

import numpy as np
import pytest

from autotune import stats
from tests.stats.simulated import autocorrelated


def block_interval(rates_per_s, seconds=()):
    half, _ = stats.block_half_width_frac(rates_per_s, seconds)
    mean = np.average(rates_per_s, weights=seconds or None)
    return None if half is None else (mean * (1 - half), mean * (1 + half))


def test_no_interval_is_claimed_from_few_blocks():
    assert block_interval([1.0, 1.1] * 15) is None
    assert block_interval([1.0, 1.1] * 16) is not None


def test_interval_of_equal_blocks_is_a_point():
    assert block_interval([4.0] * 40) == (4.0, 4.0)


def test_interval_of_unequal_blocks_is_centred_on_the_overall_rate():
    low, high = block_interval([100.0, 50.0] * 20, seconds=[1.0, 9.0] * 20)
    assert (low + high) / 2 == pytest.approx((100 + 450) / 10)


def test_block_means_cover_the_true_rate_where_single_steps_do_not():
    rng = np.random.default_rng(0)
    covered_by_blocks = covered_by_steps = 0
    for _ in range(400):
        steps = 100 + 5 * autocorrelated(rng, 1000, 0.9)
        blocks = steps.reshape(50, 20).mean(axis=1).tolist()
        low, high = block_interval(blocks)
        covered_by_blocks += low <= 100 <= high
        half = stats.half_width(steps)
        covered_by_steps += abs(float(np.mean(steps)) - 100) <= half
    assert 0.92 <= covered_by_blocks / 400 <= 0.98
    assert covered_by_steps / 400 < 0.60


def test_missing_a_slow_round_gives_no_advantage_in_round_means():
    means = stats.round_means([{0: 100.0, 1: 110.0, 2: 112.0}, {0: 50.0, 2: 56.0}])
    assert means[2] / means[0] == pytest.approx(1.12)
    assert means[1] / means[0] == pytest.approx(1.10)
    assert stats.round_means([]) == {}


@pytest.mark.parametrize(
    ("interval", "expected"), [((0.9, 0.99), True), ((0.9, 0.999), False), ((0.9, 1.1), False), (None, False)]
)
def test_slower_needs_an_interval_clearly_below_one(interval, expected):
    assert stats.is_slower(stats.Ratio(ratio=0.95, ci=interval, num_rounds=4)) is expected


def test_a_slow_drift_does_not_widen_the_margin():
    assert stats.margin_frac([100.0 * 0.99**n for n in range(16)]) == 0.01


def test_paired_interval_covers_the_true_ratio_in_spite_of_drift():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        drift = rng.normal(0, 0.2, size=5)
        a = 130 * np.exp(drift + rng.normal(0, 0.02, size=5))
        b = 100 * np.exp(drift + rng.normal(0, 0.02, size=5))
        low, high = stats.paired_ratio(a.tolist(), b.tolist()).ci
        covered += low <= 1.3 <= high
    assert 0.93 < covered / 1000 < 0.97


def test_comparison_of_equal_configurations_rarely_says_faster():
    rng = np.random.default_rng(2)
    said = {"faster": 0, "same": 0, "ambiguous": 0}
    for _ in range(1000):
        a, b = 100 * np.exp(rng.normal(0, 0.03, size=(2, 4)))
        said[stats.verdict(stats.paired_ratio(a.tolist(), b.tolist()), stats.margin_frac(b.tolist()))] += 1
    assert said["faster"] / 1000 < 0.025 + 0.01


def test_equal_configurations_are_called_the_same_on_a_quiet_machine():
    rng = np.random.default_rng(3)
    same = 0
    for _ in range(200):
        a, b = 100 * np.exp(rng.normal(0, 0.002, size=(2, 6)))
        same += stats.verdict(stats.paired_ratio(a.tolist(), b.tolist())) == "same"
    assert same / 200 > 0.95


def test_geometric_mean_of_opposite_ratios_is_one():
    assert stats.paired_ratio([2.0, 1.0], [1.0, 2.0]).ratio == pytest.approx(1.0)


def test_one_round_gives_a_ratio_without_interval_and_an_ambiguous_verdict():
    ratio = stats.paired_ratio([3.0], [1.0])
    assert (ratio.ratio, ratio.ci, stats.verdict(ratio)) == (pytest.approx(3.0), None, "ambiguous")


def test_rounds_that_do_not_pair_up_are_refused():
    with pytest.raises(ValueError, match="pair up"):
        stats.paired_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("interval", "margin", "expected"),
    [
        ((1.006, 1.2), 0.01, "faster"),
        ((1.004, 1.2), 0.01, "ambiguous"),
        ((0.995, 1.009), 0.01, "same"),
        ((0.97, 1.02), 0.01, "ambiguous"),
        ((0.97, 1.02), 0.05, "same"),
        ((0.5, 0.6), 0.01, "ambiguous"),
    ],
)
def test_verdict_follows_the_thresholds(interval, margin, expected):
    assert stats.verdict(stats.Ratio(ratio=1.0, ci=interval, num_rounds=4), margin) == expected


def test_margin_is_one_percent_unless_the_machine_is_noisier():
    assert stats.margin_frac([100.0, 100.1, 99.9]) == 0.01
    assert stats.margin_frac([100.0, 120.0, 80.0]) == pytest.approx(0.22, rel=0.05)
    assert stats.margin_frac([]) == 0.01
    assert stats.margin_frac([100.0, 150.0]) == 0.01


def test_intervals_hold_jointly_with_incomplete_rounds_on_a_drifting_machine():
    rng = np.random.default_rng(3)
    gains = {"a": 1.3, "b": 1.05, "c": 1.0, "d": 1.0, "e": 1.0}
    held = 0
    for _ in range(300):
        rounds = []
        for number in range(4):
            level = rng.normal(0, 0.2)
            shown = ["whole", *gains] if number < 2 else ["whole", "b", "c"]
            rounds.append({arm: float(np.exp(level + rng.normal(0, 0.02))) / gains.get(arm, 1.0) for arm in shown})
        found = stats.compare_rounds(rounds, "whole").ratios
        held += all(found[arm].ci[0] <= gain <= found[arm].ci[1] for arm, gain in gains.items())
    assert 0.92 <= held / 300 <= 0.99


def test_comparison_with_a_single_usable_round_has_no_interval():
    found = stats.compare_rounds([{"whole": 2.0, "a": 1.0}, {"a": 1.0, "b": 1.0}], "whole")
    assert set(found.ratios) == {"a"}
    assert found.ratios["a"] == stats.Ratio(ratio=pytest.approx(2.0), ci=None, num_rounds=1)
    assert found.noise is None
    assert stats.compare_rounds([], "whole").ratios == {}


def test_known_noise_gives_two_values_a_usable_interval():
    alone = stats.log_mean_interval([100.0, 104.0])
    helped = stats.log_mean_interval([100.0, 104.0], noise=stats.Noise(spread=0.02, freedom=12))
    assert alone[0] == pytest.approx(helped[0]) == pytest.approx(math.sqrt(100 * 104))
    assert alone[1][1] / alone[1][0] > 1.5
    assert 1.03 < helped[1][1] / helped[1][0] < 1.12
    assert stats.log_mean_interval([100.0], noise=stats.Noise(spread=0.02, freedom=12))[1] is None


def test_spread_needs_two_measurements():
    assert stats.spread_of([5.0]) is None
    found = stats.spread_of([100.0, 100.0 * math.exp(0.1)])
    assert found.freedom == 1
    assert found.spread == pytest.approx(0.1 / math.sqrt(2))


def test_quotient_of_a_ratio_without_spread_has_the_interval_of_the_other():
    now = stats.Ratio(ratio=1.5, ci=(1.5, 1.5), num_rounds=4)
    then = stats.Ratio(ratio=1.5, ci=(1.4, 1.6), num_rounds=0)
    low, high = stats.quotient(now, then).ci
    assert high / low == pytest.approx(1.6 / 1.4)


def test_larger_spread_needs_more_pairs_to_tell_a_ratio():
    def pairs(half, spread):
        return stats.pairs_to_tell(half, stats.Noise(spread=spread, freedom=6), at_most=8)

    assert [pairs(0.1, 0.02), pairs(0.1, 0.05), pairs(0.1, 0.2)] == [1, 3, 8]
    assert pairs(0.0, 0.02) == 8


def test_interval_narrows_with_lower_confidence():
    found = stats.Ratio(ratio=1.1, ci=(1.0, 1.21), num_rounds=8)
    assert stats.at_confidence(found, 0.95) == pytest.approx(found.ci)
    low, high = stats.at_confidence(found, 0.8)
    assert found.ci[0] < low < 1.1 < high < found.ci[1]
    assert low * high == pytest.approx(1.1**2)
    assert stats.at_confidence(stats.Ratio(ratio=1.1, ci=None, num_rounds=1), 0.8) is None


def test_interval_of_one_of_several_ratios_covers_the_truth_at_a_lower_confidence():
    """Two rounds of six configurations have five degrees of freedom. With one, as two pairs have, 63 % were covered."""
    rng, covered, studies = np.random.default_rng(11), 0, 1000
    for _ in range(studies):
        rounds = [{arm: float(np.exp(0.05 * rng.normal())) for arm in range(6)} for _ in range(2)]
        low, high = stats.at_confidence(stats.compare_rounds(rounds, 0).ratios[1], 0.8)
        covered += low <= 1 <= high
    assert 0.76 <= covered / studies <= 0.84
