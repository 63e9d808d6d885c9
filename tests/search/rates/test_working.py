"""Which values, or pairs of values, are blamed for failed trials.

`chance` is the probability that a configuration works, pairs aside.
"""

import pytest

from autotune.search.rates.failure_model import FailureModel, Proven

BASE = {"precision.amp": "off", "layout.channels_last": False}
AMP, LAYOUT = {**BASE, "precision.amp": "bf16"}, {**BASE, "layout.channels_last": True}
BOTH = {**AMP, **{"layout.channels_last": True}}


def test_everything_is_expected_to_work_if_nothing_has_failed():
    assert FailureModel([BASE], []).chance(BOTH) == 1.0


def test_failure_of_two_changes_blames_both_a_little():
    suspects = FailureModel([BASE], [BOTH])
    assert suspects.chance(BASE) == 1.0
    assert suspects.chance(AMP) == suspects.chance(LAYOUT) == pytest.approx(2 / 3)
    assert suspects.chance(BOTH) < suspects.chance(AMP)


def test_the_only_value_that_never_worked_is_the_cause():
    suspects = FailureModel([BASE, LAYOUT], [BOTH, AMP])
    assert suspects.chance(AMP) == 0.0
    assert suspects.chance(LAYOUT) == 1.0


def test_values_that_failed_only_together_may_work_separately():
    """LAYOUT worked alone. AMP alone was never tried, so perhaps only the combination of the two fails."""
    suspects = FailureModel([BASE, LAYOUT], [BOTH])
    assert suspects.failing(BOTH) == []
    assert suspects.chance(AMP) == 0.5
    assert suspects.suspected(BOTH) == ["precision.amp"]


def test_value_that_failed_alone_is_the_cause():
    assert FailureModel([], [{"precision.amp": "bf16"}]).failing(BOTH) == ["precision.amp"]


def test_failure_with_a_known_cause_blames_no_other_value():
    three = {**AMP, "threads.intra": 1}
    suspects = FailureModel([BASE, LAYOUT], [{"precision.amp": "bf16"}, BOTH, three])
    assert suspects.failing(three) == ["precision.amp"]
    assert suspects.suspected(three) == []
    assert suspects.chance({**BASE, "threads.intra": 1}) == 1.0


def batch(size, **others):
    return {**BASE, "loader.batch_size": size, **others}


def test_other_batch_sizes_probably_fail_where_one_fails_by_itself():
    one = FailureModel([batch(2)], [batch(4)])
    assert (one.chance(batch(2)), one.chance(batch(4))) == (1.0, 0.0)
    assert one.chance(batch(16)) == one.chance({"loader.batch_size": 16}) == pytest.approx(1 / 5)
    assert FailureModel([batch(2)], [batch(4), batch(8)]).chance(batch(16)) == pytest.approx(1 / 9)
    assert one.failing(batch(16)) == []


def test_other_batch_sizes_are_not_doubted_where_one_worked():
    assert FailureModel([batch(2), batch(8)], [batch(4)]).chance(batch(16)) == 1.0


def test_other_compile_modes_are_not_doubted_where_one_fails():
    modes = [{"compile.mode": mode} for mode in ("off", "default", "reduce-overhead")]
    assert FailureModel(modes[:1], modes[1:2]).chance(modes[2]) == 1.0


def test_value_that_failed_more_often_is_suspected_first():
    one, other = {"a": 1, "b": 1}, {"b": 1, "c": 1}
    assert FailureModel([], [one, other]).suspected(one) == ["b", "a"]


def test_failure_of_values_that_worked_elsewhere_blames_only_their_combination():
    suspects = FailureModel([BASE, AMP, LAYOUT], [BOTH])
    assert suspects.chance(AMP) == 1.0
    assert suspects.suspected(BOTH) == []
    assert {frozenset(key for key, _, _ in pair): chance for pair, chance in suspects.pairs.items()} == {
        frozenset(BOTH): pytest.approx(1 / 2)
    }


def test_a_pair_that_worked_together_is_not_blamed():
    three, threads = {**BOTH, "threads.intra": 1}, {**BASE, "threads.intra": 1}
    suspects = FailureModel([BASE, BOTH, threads], [three])
    assert {frozenset(key for key, _, _ in pair): chance for pair, chance in suspects.pairs.items()} == {
        frozenset({"precision.amp", "threads.intra"}): pytest.approx(2 / 3),
        frozenset({"layout.channels_last", "threads.intra"}): pytest.approx(2 / 3),
    }


def test_the_only_pair_that_explains_all_failures_is_the_cause():
    first, second = {**BOTH, "threads.intra": 1}, {**BOTH, "loader.num_workers": 4}
    alone = [{**BASE, "threads.intra": 1}, {**BASE, "loader.num_workers": 4}]
    suspects = FailureModel([BASE, AMP, LAYOUT, *alone], [first, second])
    assert {frozenset(key for key, _, _ in pair): chance for pair, chance in suspects.pairs.items()} == {frozenset(BOTH): 0.0}


def test_working_configurations_may_be_added_one_by_one():
    worked, three = [BASE, AMP, LAYOUT], {**BOTH, "threads.intra": 8}
    proven = Proven()
    for params in worked:
        proven.add(params)
    one, other = FailureModel(proven, [BOTH, three]), FailureModel(worked, [BOTH, three])
    assert one.chance(three) == other.chance(three) < 1
    assert one.pairs == other.pairs != {}
