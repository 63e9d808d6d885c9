"""The spread of a measurement, estimated from everything except the pairs that are judged."""

import math

import numpy as np
import pytest

from autotune import stats
from autotune.compare.noise import MAX_FREEDOM, as_json, from_json, noise_besides, noise_of, rounds_of
from autotune.records import Kind, Outcome
from autotune.stats import Noise
from autotune.trials.health import ACCEPTED
from tests.support.records import a_trial


def final(number, repeats, score, round_number, why="finals, reported"):
    changed = {"env.A": "1"} if repeats else {}
    return a_trial(number, kind=Kind.final, changed=changed, value=score, round=round_number, repeats=repeats, why=why)


def first(number, score):
    return a_trial(number, changed={"env.A": str(number)} if number else {}, value=score)


def test_search_counts_as_one_round_of_the_configurations_measured_again():
    records = [first(0, 100.0), first(1, 150.0), first(2, 90.0), final(3, 1, 140.0, 1), final(4, 0, 101.0, 1)]
    rounds = rounds_of(records)
    assert [sorted(measured.values()) for measured in rounds] == [[100.0, 150.0], [101.0, 140.0]]


def test_search_rates_from_before_an_accepted_disturbance_are_no_noise():
    """Another program made everything slower after the baseline: the verdict's interval was far too wide."""
    ended = [first(0, 100.0), first(1, 105.0), final(2, 1, 105.0, 1), final(3, 0, 70.0, 1)]
    assert len(rounds_of(ended)) == 2
    ended[1].evidence[ACCEPTED] = {"cpu": 1.0}
    assert rounds_of(ended) == [{frozenset(ended[2].changed.items()): 105.0, frozenset(): 70.0}]
    ended[0].evidence[ACCEPTED] = ended[1].evidence.pop(ACCEPTED)
    assert len(rounds_of(ended)) == 2, "the baseline itself was measured under the disturbance"


def test_rate_in_doubt_that_was_measured_again_is_no_noise():
    """The search repeats a trial that load has slowed unnoticed, but its first rate counted as the machine's usual scatter."""
    again = a_trial(2, changed={"env.A": "1"}, value=150.0, origin="again")
    rounds = rounds_of([first(0, 100.0), first(1, 75.0), again, final(3, 1, 150.0, 1), final(4, 0, 100.0, 1)])
    assert noise_of(rounds).spread < 1e-9


def test_round_of_one_configuration_gives_no_noise_estimate():
    assert rounds_of([first(0, 100.0), final(1, 0, 101.0, 1)]) == []
    assert noise_of([]) is None


def test_scatter_of_the_judged_pairs_is_not_counted_twice():
    pairs = [(150.0, 100.0), (153.0, 100.0), (147.0, 100.0)]
    rounds = [{1: own, 0: other} for own, other in pairs]
    assert noise_besides(pairs, rounds) is None
    searched = {1: 160.0, 0: 100.0}
    found = noise_besides(pairs, [searched, *rounds])
    assert found.freedom == 1
    assert found.spread == pytest.approx(math.log(1.6 / 1.5) / math.sqrt(2) * math.sqrt(3 / 4), rel=0.05)


@pytest.mark.parametrize("not_ok", [{0: Outcome.infeasible}, {1: Outcome.unsteady}, {0: Outcome.unsteady, 1: Outcome.unsteady}])
def test_scatter_besides_the_pairs_is_the_same_if_their_trials_may_not_win(not_ok):
    """The pairs were subtracted from rounds that did not contain them, so the spread was 0 and the interval far too narrow."""

    def found(outcomes):
        rng, records = np.random.default_rng(1), []
        for number, spread in [(1, 0.02), (2, 0.02), (3, 0.02), (4, 0.05), (5, 0.05), (6, 0.05)]:
            why = "finals, choosing" if spread < 0.05 else "finals, reported"
            for repeats in (0, 1):
                score = (100.0 + 50.0 * repeats) * math.exp(spread * rng.normal())
                records.append(final(len(records) + 3, repeats, score, number, why))
                if why == "finals, reported" or outcomes.get(repeats) is Outcome.infeasible:
                    records[-1].outcome = outcomes.get(repeats, Outcome.ok)
        values = [record.score for record in records if record.round > 3]
        pairs = list(zip(values[1::2], values[::2], strict=True))
        return noise_besides(pairs, rounds_of([first(0, 100.0), first(1, 150.0), *records]))

    assert found(not_ok).freedom == found({}).freedom == 4
    assert found(not_ok).spread == pytest.approx(found({}).spread)
    assert found({}).spread > 0.005


def test_other_rounds_do_not_outweigh_the_pairs():
    rng = np.random.default_rng(0)
    rounds = [{arm: 100 * math.exp(0.02 * rng.normal()) for arm in range(5)} for _ in range(6)]
    found = noise_besides([(100.0, 99.0), (101.0, 100.0)], [*rounds, {0: 100.0, 1: 99.0}, {0: 101.0, 1: 100.0}])
    assert found.freedom == MAX_FREEDOM
    assert found.spread == pytest.approx(0.02, rel=0.5)


def test_noise_of_earlier_studies_counts_with_its_degrees_of_freedom():
    earlier = Noise(spread=0.02, freedom=4)
    assert noise_besides([(1.0, 1.0)], [], earlier) == earlier
    alone, known = (stats.paired_ratio([150.0, 153.0], [100.0, 100.0], noise=noise) for noise in (None, earlier))
    assert known.freedom == 5
    assert math.log(known.ci[1] / known.ci[0]) < 0.5 * math.log(alone.ci[1] / alone.ci[0])


@pytest.mark.parametrize("stored", [None, {}, {"spread": "x"}, {"spread": 0.0, "freedom": 3}, {"freedom": 2}])
def test_damaged_noise_record_is_ignored(stored):
    assert from_json(stored) is None
    assert from_json(as_json(Noise(spread=0.02, freedom=3))) == Noise(spread=0.02, freedom=3)


def test_claim_of_two_pairs_is_compared_with_its_own_degrees_of_freedom():
    """The standard error is computed from the interval, which needs the interval's own degrees of freedom.

    With one degree of freedom instead, the error would be four times too small.
    """
    then = stats.paired_ratio([150.0, 153.0], [100.0, 100.0], noise=Noise(spread=0.02, freedom=6))
    now = stats.paired_ratio([148.0, 150.0, 151.0, 149.0], [100.0] * 4)
    left = stats.quotient(now, then)
    half, own = math.log(left.ci[1] / left.ci[0]) / 2, math.log(then.ci[1] / then.ci[0]) / 2
    assert half > 0.6 * own
