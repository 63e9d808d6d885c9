import random

from autotune.compare.interleaving import Interleaving
from autotune.records import Outcome
from tests.support.records import a_trial


def taking_turns(answers, seed=0):
    """Returns an interleaving of trials 1 and 0, and the list of trial numbers in the order in which it measures them.

    `answers` are the measured values.
    """
    measured, left = [], list(answers)

    def measure(first):
        measured.append(first.number)
        value = left.pop(0)
        return a_trial(first.number, value=value, outcome=Outcome.ok if value else Outcome.disturbed)

    return Interleaving(a_trial(1, value=9.0), a_trial(0, value=5.0), measure=measure, order=random.Random(seed)), measured


def test_second_of_every_two_rounds_reverses_the_order():
    turns, measured = taking_turns(range(1, 41))
    pairs = [turns.round() for _ in range(20)]
    orders = [measured[at : at + 2] for at in range(0, 40, 2)]
    assert all(first == second[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    assert {tuple(order) for order in orders[::2]} == {(0, 1), (1, 0)}
    assert all(own - other == (1 if order == [0, 1] else -1) for (own, other), order in zip(pairs, orders, strict=True))


def test_second_trial_of_a_round_is_not_measured_after_the_first_has_failed():
    turns, measured = taking_turns([None, 3.0, None, 6.0, 5.0])
    assert (turns.round(), len(measured)) == (None, 1)
    assert (turns.round(), len(measured)) == (None, 3)
    assert turns.round() is not None
    assert len(turns.pairs) == 1
