"""The running totals of a study's trials equal the totals of a full recount."""

import random

import pytest

from autotune.records import Kind, Outcome, Tier
from autotune.trials.tally import Tally
from tests.support.records import a_trial


def trial(number, rng, *, names=("throughput",)):
    """Returns a trial with a random outcome, score, tier and number of neighbours; the first is the baseline."""
    outcome = rng.choice([*Outcome, Outcome.ok, Outcome.ok, Outcome.ok])
    value = rng.choice([100.0, 110.0, rng.uniform(50, 150)]) if outcome.has_value or outcome is Outcome.parity else None
    scores = {name: value and value * (1 if name == "throughput" else rng.uniform(-2, 2)) for name in names}
    return a_trial(
        number,
        changed={"loader.num_workers": number} if number else {},
        outcome=outcome,
        seconds=rng.uniform(5, 20),
        value=value,
        scores=scores if rng.random() < 0.8 or len(names) > 1 else {},
        ci=(value - 1, value + 1) if value and rng.random() < 0.8 else None,
        tier=rng.choice(list(Tier)),
        neighbours=rng.choice([0, 3]),
    )


def scores_of(record):
    return list(record.scores.values()) or [record.value]


@pytest.mark.parametrize("names", [("throughput",), ("throughput", "energy")])
@pytest.mark.parametrize("seed", range(20))
def test_tally_of_trials_in_any_order_equals_a_full_recount(names, seed):
    rng = random.Random(seed)
    records = [trial(number, rng, names=names) for number in range(40)]
    tally = Tally()
    for record in rng.sample(records, len(records)):  # parallel trials end in another order than they began
        tally.add(record)
    over = [record for record in records if record.outcome is not Outcome.interrupted]
    assert tally.num_over == len(over)
    assert tally.seconds == sorted(record.seconds for record in over if record.kind is Kind.search)
    tried = [record for record in records[1:] if not record.outcome.is_no_answer]
    assert tally.has_worked == any(record.outcome.has_value or record.outcome.is_memory for record in tried)
    able = [record for record in records if record.outcome.may_win and record.score is not None]
    for turn in range(len(names)):
        best = max(able, key=lambda record: scores_of(record)[turn] or 0.0)
        assert tally.best(turn) is best, "of equal trials, the first"
        known = [scores_of(record)[turn] for record in records if None not in scores_of(record)]
        assert tally.worst(len(names))[turn] == min(known)
    for tier in Tier:
        for has_neighbours in (False, True):
            rivals = [one for one in able if one.ci and bool(one.neighbours) == has_neighbours and one.tier.rank <= tier.rank]
            wanted = max((one.ci[0] for one in rivals), default=None)
            assert tally.proven_per_s(tier, has_neighbours=has_neighbours) == wanted


def test_empty_tally_has_no_values():
    tally = Tally()
    assert (tally.num_over, tally.best(0), tally.worst(1), tally.has_worked) == (0, None, [], False)
    assert tally.proven_per_s(Tier.training, has_neighbours=False) is None
