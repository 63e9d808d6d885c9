"""What attribution rounds say about the parts of a winner, tested without a study.

A change is idle if it hardly gains anything, by estimates from all trials (see `AblationResults.idle`).
"""

import math

import pytest

from autotune.compare import ablation as parts
from autotune.compare.ablation import AblationResults, part_of
from autotune.records import Kind, Outcome
from autotune.space import Choice, ResolvedSpace
from autotune.stats import Noise, Ratio
from tests.support.records import a_trial

WORKERS, PREFETCH, AMP, PIN = "loader.num_workers", "loader.prefetch_factor", "precision.amp", "loader.pin_memory"
REFERENCE = {WORKERS: 0, PREFETCH: 2, AMP: "off", PIN: False}
SPACE = ResolvedSpace(
    domains={WORKERS: Choice((0, 2)), PREFETCH: Choice((2, 8)), AMP: Choice(("off", "bf16")), PIN: Choice((False, True))},
    pinned={},
    baseline={WORKERS: 0, AMP: "off", PIN: False},
    dropped={},
    reference=REFERENCE,
)
CHANGED = {WORKERS: 2, PREFETCH: 8, AMP: "bf16", PIN: True}
WINNER = a_trial(7, knobs={**REFERENCE, **CHANGED}, changed=CHANGED, value=100.0)
NOISE_OF_ONE_PERCENT = Noise(spread=0.01, freedom=8)
NOISE = (1.001, 0.999, 1.0015, 0.9985)


def rounds(*without, values=None, count=2, noise_power=1):
    """Returns the trials of `count` attribution rounds: the winner, with a rate of 100, and its parts.

    Part n is the winner without the knobs `without[n]`. It has the rate `values[n]`, or fails with this outcome.
    """
    made = []
    for number in range(1, count + 1):
        for keys, value in [((), 100.0), *zip(without, values or [], strict=True)]:
            changed = dict(part_of(SPACE, WINNER, keys).key)
            outcome = value if isinstance(value, Outcome) else Outcome.ok
            noise = NOISE[(number + len(made)) % len(NOISE)] ** noise_power
            score = None if isinstance(value, Outcome) else value * noise
            more = {"changed": changed, "outcome": outcome, "value": score, "round": number}
            made.append(a_trial(8 + len(made), kind=Kind.attribution, **more))
    return made


def test_reverting_a_knob_also_reverts_knobs_that_depend_on_it():
    part = part_of(SPACE, WINNER, [WORKERS])
    assert part.also == (PREFETCH,)
    assert dict(part.key) == {AMP: "bf16", PIN: True}
    assert PREFETCH not in part.knobs
    assert part_of(SPACE, WINNER, [PREFETCH]).also == ()


def test_first_each_knob_is_reverted_alone():
    evidence = AblationResults(SPACE, WINNER, [])
    assert {next(iter(part.keys)) for part in evidence.wanted(list(CHANGED))} == set(CHANGED)
    assert all(evidence.worth(knob) == "not measured" for knob in CHANGED)
    assert evidence.minimal() is None


ALONE = [(WORKERS,), (PREFETCH,), (AMP,), (PIN,)]


def test_knobs_without_a_shown_effect_are_then_reverted_together():
    evidence = AblationResults(SPACE, WINNER, rounds(*ALONE, values=[80.0, 100.0, 70.0, 99.9]))
    assert (evidence.worth(WORKERS), evidence.worth(AMP)) == ("faster", "faster")
    (together,) = evidence.wanted(list(CHANGED))
    assert together.keys == {PREFETCH, PIN}
    assert len(evidence.minimal().keys) == 1, "both together have not been measured"


@pytest.mark.parametrize(("value", "is_dropped"), [(100.1, True), (93.0, False)])
def test_knobs_reverted_together_are_dropped_if_the_rate_stays_within_the_margin(value, is_dropped):
    trials = rounds(*ALONE, (PREFETCH, PIN), values=[80.0, 100.0, 70.0, 99.9, value], count=4)
    minimal = AblationResults(SPACE, WINNER, trials).minimal()
    assert (minimal is not None and minimal.keys == {PREFETCH, PIN}) is is_dropped


@pytest.mark.parametrize(("value", "is_dropped"), [(99.2, True), (97.0, False)])
def test_slowdown_of_three_percent_is_too_much_even_on_a_noisier_machine(value, is_dropped):
    trials = rounds((PREFETCH, PIN), values=[value], count=8, noise_power=30)
    evidence = AblationResults(SPACE, WINNER, trials)
    assert evidence.margin > 0.03
    minimal = evidence.minimal()
    assert (minimal is not None and minimal.keys == {PREFETCH, PIN}) is is_dropped


def test_if_knobs_matter_together_the_one_with_the_largest_effect_is_kept():
    trials = rounds(*ALONE, (PREFETCH, PIN), values=[80.0, 100.0, 70.0, 99.5, 93.0], count=4)
    evidence = AblationResults(SPACE, WINNER, trials)
    assert evidence.together().keys == {PREFETCH}


def test_knob_is_needed_if_the_winner_fails_without_it():
    trials = rounds(*ALONE, values=[80.0, 100.0, Outcome.device_oom, 99.9])
    evidence = AblationResults(SPACE, WINNER, trials)
    (change,) = [change for change in evidence.changes() if change.knob == AMP]
    assert (change.worth, change.is_kept, change.ratio) == ("needed", True, None)
    assert change.reason == "without it: device_oom"


def test_knob_is_needed_after_two_crashes_but_not_after_interruptions_or_noise():
    once = AblationResults(SPACE, WINNER, rounds((AMP,), values=[Outcome.crash], count=1))
    assert once.worth(AMP) == "not measured"
    assert AblationResults(SPACE, WINNER, rounds((AMP,), values=[Outcome.crash])).worth(AMP) == "needed"
    for no_answer in (Outcome.interrupted, Outcome.disturbed):
        assert AblationResults(SPACE, WINNER, rounds((AMP,), values=[no_answer])).worth(AMP) == "not measured"


def test_knob_that_costs_speed_is_reverted():
    trials = rounds(*ALONE, (PREFETCH, PIN), values=[80.0, 110.0, 70.0, 99.9, 109.9], count=3)
    evidence = AblationResults(SPACE, WINNER, trials)
    assert evidence.worth(PREFETCH) == "slower"
    assert evidence.minimal().keys == {PREFETCH, PIN}
    assert evidence.wanted(list(CHANGED)) == [], "nothing is left to measure"


def test_no_more_parts_are_wanted_after_the_maximum_number_of_rounds():
    trials = rounds(*ALONE, values=[80.0, 100.0, 70.0, 99.9], count=parts.MAX_ROUNDS)
    assert AblationResults(SPACE, WINNER, trials).wanted(list(CHANGED)) == []


def test_changes_are_sorted_by_effect_largest_first():
    evidence = AblationResults(SPACE, WINNER, rounds(*ALONE, values=[80.0, 99.9, 70.0, 100.0]))
    assert [change.knob for change in evidence.changes()] == [AMP, WORKERS, PREFETCH, PIN]


ESTIMATES = {
    knob: Ratio(ratio=ratio, ci=(ratio * 0.97, ratio * 1.03), num_rounds=0)
    for knob, ratio in ((WORKERS, 1.3), (AMP, 1.4), (PREFETCH, 1.0), (PIN, 1.01))
}


def test_with_little_time_promising_knobs_are_reverted_alone_and_others_together():
    evidence = AblationResults(SPACE, WINNER, [], ESTIMATES)
    assert [part.keys for part in evidence.wanted([AMP])] == [{PREFETCH, PIN}, {AMP}]
    assert [part.keys for part in evidence.wanted([])] == [{PREFETCH, PIN}]
    assert len(evidence.wanted(list(CHANGED))) == 4, "with enough time, every knob is reverted alone"


def test_knob_reverted_only_with_others_is_dropped_with_an_estimated_effect():
    trials = rounds((PREFETCH, PIN), (AMP,), values=[100.05, 70.0])
    evidence = AblationResults(SPACE, WINNER, trials, ESTIMATES)
    assert evidence.minimal().keys == {PREFETCH, PIN}
    found = {change.knob: change for change in evidence.changes()}
    assert (found[PIN].is_kept, found[PIN].basis, found[PIN].worth) == (False, "estimated", "ambiguous")
    assert (found[WORKERS].is_kept, found[WORKERS].basis, found[WORKERS].worth) == (True, "estimated", "faster")
    assert (found[AMP].basis, found[AMP].worth) == ("measured", "faster")
    bare = {change.knob: change for change in AblationResults(SPACE, WINNER, trials).changes()}
    assert (bare[WORKERS].ratio, bare[WORKERS].worth, bare[WORKERS].reason) == (None, "not measured", "no time")


def test_wrong_estimate_is_overruled_once_the_knobs_together_cost_speed():
    trials = rounds((PREFETCH, PIN), (AMP,), values=[90.0, 70.0], count=3)
    evidence = AblationResults(SPACE, WINNER, trials, ESTIMATES)
    assert evidence.minimal() is None
    assert evidence.together().keys == {PREFETCH}


def estimates(**effects):
    """Returns estimates from all trials: the effect of each change, with an interval of 5 % on either side."""
    named = {WORKERS: "workers", PREFETCH: "prefetch", AMP: "amp", PIN: "pin"}
    return {
        knob: Ratio(ratio=effects[name], ci=(effects[name] / 1.05, effects[name] * 1.05), num_rounds=9)
        for knob, name in named.items()
    }


def test_idle_changes_are_dropped_only_if_the_rest_was_measured():
    effects = estimates(workers=1.3, prefetch=1.004, amp=1.6, pin=0.98)
    rest = part_of(SPACE, WINNER, [PREFETCH, PIN])
    untried = AblationResults(SPACE, WINNER, [], effects)
    assert untried.idle().keys == {PREFETCH, PIN}
    assert untried.minimal() is None, "only a measured configuration is exported"
    assert AblationResults(SPACE, WINNER, [], effects, measured={rest.key: [100.0]}).minimal().keys == {PREFETCH, PIN}


def test_idle_change_is_kept_unless_the_winner_was_measured_without_it():
    effects = estimates(workers=1.3, prefetch=1.004, amp=1.6, pin=0.98)
    without_pin, without_amp = part_of(SPACE, WINNER, [PIN]), part_of(SPACE, WINNER, [AMP])
    measured = {without_pin.key: [100.0], without_amp.key: [60.0]}
    assert AblationResults(SPACE, WINNER, [], effects, measured=measured).minimal().keys == {PIN}


def test_idle_changes_that_replace_each_other_are_not_dropped_together():
    effects = estimates(workers=1.3, prefetch=1.004, amp=1.6, pin=0.98)
    both, one = part_of(SPACE, WINNER, [PREFETCH, PIN]), part_of(SPACE, WINNER, [PIN])
    measured = {both.key: [63.0], part_of(SPACE, WINNER, []).key: [100.0, 101.0]}
    known = AblationResults(SPACE, WINNER, [], effects, NOISE_OF_ONE_PERCENT, measured)
    assert known.idle().keys == {PIN}, "the change with the lower ratio is still left out"
    assert known.minimal() is None
    known = AblationResults(SPACE, WINNER, [], effects, NOISE_OF_ONE_PERCENT, {**measured, one.key: [100.5]})
    assert known.minimal().keys == {PIN}


def test_vagueness_of_an_effect_is_that_of_its_narrower_interval():
    wide = {knob: Ratio(ratio=1.3, ci=(1.0, 1.69), num_rounds=0) for knob in CHANGED}
    measured = AblationResults(SPACE, WINNER, rounds((AMP,), values=[60.0]), wide)
    assert measured.vagueness(AMP) < 0.1 < measured.vagueness(PIN)


def batch(estimate, rates=(), noise=None):
    """Returns the idle changes of a winner with bf16 and a new batch size, whose effect is `estimate`; None for none.

    `rates` are those of the winner, and of the winner without one of the two changes, in each of two rounds.
    """
    key = "loader.batch_size"
    space = ResolvedSpace(
        domains={key: Choice((32, 64)), AMP: Choice(("off", "bf16"))},
        pinned={}, baseline={key: 32, AMP: "off"}, dropped={}, reference={key: 32, AMP: "off"},
    )  # fmt: skip
    changed = {key: 64, AMP: "bf16"}
    winner = a_trial(7, knobs=changed, changed=changed, value=100.0)
    parts = [changed, {AMP: "bf16"}, {key: 64}]
    trials = [
        a_trial(8, kind=Kind.attribution, changed=part, value=rate, round=number)
        for number in (1, 2)
        for part, rate in zip(parts, rates, strict=False)
    ]
    effects = {key: estimate, AMP: Ratio(ratio=1.6, ci=(1.5, 1.7), num_rounds=0)}
    return AblationResults(space, winner, trials, effects, noise).idle()


def test_batch_size_is_idle_without_a_likely_gain_unless_the_estimate_is_vague():
    assert batch(Ratio(ratio=1.05, ci=(0.95, 1.16), num_rounds=0)).keys == {"loader.batch_size"}
    assert batch(Ratio(ratio=1.02, ci=(1.01, 1.03), num_rounds=0)).keys == {"loader.batch_size"}
    assert batch(Ratio(ratio=1.05, ci=(1.01, 1.09), num_rounds=0)) is None
    assert batch(Ratio(ratio=1.05, ci=(0.6, 1.84), num_rounds=0)) is None


def test_batch_size_whose_gain_is_unlikely_after_two_rounds_is_idle():
    """The 80 % interval was computed as if the 95 % interval had one degree of freedom, so it was too narrow."""
    clear, rates = Ratio(ratio=1.3, ci=(1.2, 1.4), num_rounds=0), (100.0, 100.0 / 1.07, 60.0)
    assert batch(clear, rates, Noise(spread=0.06, freedom=6)).keys == {"loader.batch_size"}
    assert batch(clear, rates, Noise(spread=0.03, freedom=6)) is None


def test_idle_changes_have_a_total_effect_within_the_limit():
    effects = estimates(workers=1.3, prefetch=1.024, amp=1.6, pin=1.02)
    assert AblationResults(SPACE, WINNER, [], effects).idle().keys == {PIN}


def test_change_with_a_small_effect_is_idle_unless_its_gain_is_likely():
    doubtful = estimates(workers=1.3, prefetch=1.02, amp=1.6, pin=1.1)
    assert AblationResults(SPACE, WINNER, [], doubtful).idle().keys == {PREFETCH}
    likely = {**doubtful, PREFETCH: Ratio(ratio=1.02, ci=(1.005, 1.035), num_rounds=4)}
    assert AblationResults(SPACE, WINNER, [], likely).idle() is None


def test_estimate_does_not_overrule_a_measured_gain():
    effects = estimates(workers=1.3, prefetch=1.0, amp=1.6, pin=1.3)
    trials = rounds((PREFETCH,), values=[90.0], count=3, noise_power=8)
    assert AblationResults(SPACE, WINNER, [], effects).idle().keys == {PREFETCH}
    assert AblationResults(SPACE, WINNER, trials, effects).idle() is None


def test_a_few_noisy_rounds_do_not_overrule_a_gain_that_all_trials_show():
    trials = rounds((PREFETCH,), values=[101.0], count=2, noise_power=60)
    gain = {
        **estimates(workers=1.3, prefetch=1.05, amp=1.6, pin=1.3),
        PREFETCH: Ratio(ratio=1.05, ci=(0.93, 1.18), num_rounds=9),
    }
    assert AblationResults(SPACE, WINNER, trials).minimal().keys == {PREFETCH}
    assert AblationResults(SPACE, WINNER, trials, gain).minimal() is None
    precise = rounds((PREFETCH,), values=[101.0], count=4)
    assert AblationResults(SPACE, WINNER, precise, gain).minimal().keys == {PREFETCH}


def test_changes_idle_by_estimate_and_by_measurement_are_dropped_together():
    trials = rounds((PIN,), values=[100.0], count=8)
    effects = estimates(workers=1.3, prefetch=0.99, amp=1.6, pin=1.0)
    rest = part_of(SPACE, WINNER, [PREFETCH, PIN])
    assert AblationResults(SPACE, WINNER, trials, effects).minimal().keys == {PIN}
    assert AblationResults(SPACE, WINNER, trials, effects, measured={rest.key: [100.0]}).minimal().keys == {PREFETCH, PIN}


def test_vagueness_of_an_estimate_is_the_half_width_of_its_interval():
    effects = {**estimates(workers=1.3, prefetch=1.0, amp=1.6, pin=1.1), PIN: Ratio(ratio=1.0, ci=None, num_rounds=1)}
    del effects[AMP]
    evidence = AblationResults(SPACE, WINNER, [], effects)
    assert evidence.vagueness(WORKERS) == pytest.approx(math.log(1.05))
    assert math.isinf(evidence.vagueness(AMP))
    assert math.isinf(evidence.vagueness(PIN))


def test_single_trials_are_no_rounds():
    trials = rounds((AMP,), values=[60.0])
    assert AblationResults(SPACE, WINNER, trials).num_rounds == 2
    for number, trial in enumerate(trials, 1):
        trial.round = number
    apart = AblationResults(SPACE, WINNER, trials)
    assert (apart.num_rounds, apart.ratio(apart.parts[AMP])) == (0, None)


def test_no_change_is_idle_if_all_have_an_effect():
    effects = estimates(workers=1.3, prefetch=1.1, amp=1.6, pin=1.05)
    assert AblationResults(SPACE, WINNER, [], effects).idle() is None


def test_parts_that_seem_as_fast_as_the_winner_need_more_rounds():
    evidence = AblationResults(SPACE, WINNER, rounds(*ALONE, values=[80.0, 101.0, 70.0, 99.5], count=2))
    assert {next(iter(part.keys)) for part in evidence.parts_as_fast(num_rounds=3)} == {PREFETCH, PIN}
    assert evidence.parts_as_fast(num_rounds=2) == []
