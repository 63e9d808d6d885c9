import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from autotune.search.rates import coding as coding_module
from autotune.search.rates.coding import BATCH, Coding, Levelled, levels_of
from autotune.search.rates.model import LinearModel

SPACE = {
    "loader.batch_size": CategoricalDistribution([16, 32, 64, 128]),
    "precision.amp": CategoricalDistribution(["off", "bf16"]),
    "optimizer.implementation": CategoricalDistribution(["default", "foreach", "fused"]),
}
EFFECTS = {"bf16": 0.6, "foreach": 0.1, "fused": 0.2}
CODING = Coding(SPACE)
CODES = CODING.all_codes()


def truth(codes, pair=0.0):
    """Returns logs of rates. A batch of 24 reaches half of the limit. Effects are additive, except for one pair of knobs."""
    found = []
    for row in codes:
        knobs = CODING.decode(row)
        batch, amp, optimizer = knobs.values()
        value = np.log(batch / (batch + 24)) + EFFECTS.get(amp, 0) + EFFECTS.get(optimizer, 0)
        found.append(value + pair * (amp == "bf16" and batch == 128))
    return np.array(found)


def fitted(places, y):
    return LinearModel(CODING.features(CODES[places]), y)


def everywhere():
    return CODING.features(CODES)


def test_planted_effects_are_recovered_from_one_measurement_for_each_level():
    places = [0, 3, 1, 2, 6, 12, 18, 16]
    noise = np.random.default_rng(0).normal(0, 0.01, len(places))
    model = fitted(places, truth(CODES[places]) + noise)
    assert np.abs(model.mean(everywhere()) - truth(CODES)).max() < 0.1


def test_negative_interaction_of_two_knobs_is_learned():
    model = fitted(list(range(len(CODES))), truth(CODES, pair=-0.4))
    assert np.abs(model.mean(everywhere()) - truth(CODES, pair=-0.4)).max() < 0.1


def test_draws_vary_little_where_a_rate_was_measured_and_more_elsewhere():
    places = [0, 3, 6]
    model = fitted(places, truth(CODES[places]))
    draws = model.draws(everywhere(), num=1600, rng=np.random.default_rng(1))
    assert draws.mean(axis=1) == pytest.approx(model.mean(everywhere()), abs=0.08)
    spread = draws.std(axis=1)
    assert spread[places].max() < 0.04
    assert spread[-1] > 3 * spread[places].max(), "fused, bf16 and the largest batch were never seen together"


def test_noisy_measurement_moves_the_model_less():
    features = CODING.features(CODES[[0, 0]])
    rough = LinearModel(features, np.array([0.0, 1.0]), noise=np.array([1.0, 20.0]), usual=(0.3, 0.1, 0.1))
    assert rough.mean(features)[0] < 0.2


def test_absent_knob_has_zero_columns_and_measured_values_in_a_range_become_levels():
    coding = Coding(
        {"loader.prefetch_factor": CategoricalDistribution([2, 4]), "x": IntDistribution(1, 1000, log=True)}, [{"x": 48}]
    )
    absent = coding.encode([{"x": 1}])
    assert not coding.features(absent).effects.any()
    assert coding.decode(coding.encode([{"x": 48}])[0]) == {"x": 48}
    assert coding.knobs[1].values == (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512, 1000)


@pytest.mark.parametrize(
    ("found", "levels"),
    [
        (IntDistribution(8, 512), [8, 64, 128, 192, 256, 320, 384, 448, 512]),
        (IntDistribution(0, 16), [0, 2, 4, 6, 8, 10, 12, 14, 16]),
        (IntDistribution(6, 100, log=True), [6, 12, 24, 48, 96, 100]),
        (IntDistribution(1, 25, step=3), [1, 4, 7, 10, 13, 16, 19, 22, 25]),
        (FloatDistribution(0.0, 1.0, step=0.25), [0.0, 0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_levels_of_a_range_are_round_numbers_or_doublings_with_both_ends(found, levels):
    assert levels_of(found) == levels


def test_range_has_a_level_between_the_best_value_and_each_tried_neighbour():
    ranges = {"x": IntDistribution(8, 512), "y": IntDistribution(1, 4)}
    tried = [{"x": 64, "y": 2}, {"x": 128, "y": 1}]
    values = [knob.values for knob in Coding(ranges, tried, best=tried[0]).knobs]
    assert values == [(8, 64, 96, 128, 192, 256, 320, 384, 448, 512), (1, 2, 3, 4)]


def test_step_from_zero_counts_at_most_as_a_change_of_an_unordered_value():
    variances = {values: Levelled("any", values, True).columns()[1] for values in ((0, 2**20, 2**21), (0, 1, 3))}
    assert variances[0, 2**20, 2**21] == pytest.approx([1.0, 1 / 3], rel=1e-5)
    assert variances[0, 1, 3] == pytest.approx([1 / 3, 1 / 3])


def test_true_and_1_are_distinct_values():
    coding = Coding({"a": CategoricalDistribution([False, True]), "b": CategoricalDistribution([0, 1])})
    (row,) = coding.encode([{"a": True, "b": 1}])
    assert coding.decode(row) == {"a": True, "b": 1}
    assert coding.decode(row)["a"] is True


def test_variances_agree_with_joint_draws():
    model = fitted([0, 3, 6], truth(CODES[[0, 3, 6]]))
    own, shared, of_first = model.variances(everywhere(), everywhere()[:1])
    draws = model.draws(everywhere(), num=20_000, rng=np.random.default_rng(2))
    assert own == pytest.approx(draws.var(axis=1), rel=0.1, abs=2e-4)
    assert of_first == pytest.approx(draws[0].var(), rel=0.1, abs=2e-4)
    between = (draws - draws[0]).var(axis=1)
    assert own + of_first - 2 * shared == pytest.approx(between, rel=0.1, abs=2e-4)


def test_interactions_equal_the_inner_products_of_all_pairs_of_columns(monkeypatch):
    coding = Coding(SPACE)
    codes = coding.all_codes()
    columns = [knob.pair_columns()[codes[:, place]] for place, knob in enumerate(coding.knobs)]
    products = [
        (columns[one][:, :, None] * columns[other][:, None, :]).reshape(len(codes), -1)
        for one, other in [(0, 1), (0, 2), (1, 2)]
    ]
    listed = np.hstack(products)
    features = coding.features(codes)
    assert features.norms()[1] == pytest.approx(np.diag(features.of_interactions(features)))
    assert (features.of_interactions(features) > listed @ listed.T).all()
    monkeypatch.setattr(coding_module, "TOGETHER_VARIANCE", 0.0)
    assert features.of_interactions(features) == pytest.approx(listed @ listed.T)


def test_forecast_is_less_certain_the_more_knobs_differ_from_what_was_measured():
    one_each = [0, 1, 2, 3, 4, 6, 12, 18, 16, 20]
    model = fitted(one_each, truth(CODES[one_each]))
    own, _, _ = model.variances(everywhere(), everywhere()[:1])
    num_known = np.array([(CODES[one_each] == row).all(axis=1).sum() for row in CODES])
    differing = np.array([min((row != CODES[place]).sum() for place in one_each) for row in CODES])
    assert own[num_known > 0].max() < own[differing == 1].mean() < own[differing == differing.max()].max()


def test_ordered_mode_inherits_the_effect_of_the_previous_one():
    modes = ("off", "default", "reduce-overhead", "max-autotune")
    coding = Coding(
        {"compile.mode": CategoricalDistribution(["max-autotune", "off", "default"])}, ladders={"compile.mode": (modes, 0.6)}
    )
    assert coding.knobs[0].values == ("off", "default", "max-autotune")
    model = LinearModel(coding.features(np.array([[0], [1]])), np.array([0.0, -0.3]))
    assert model.mean(coding.features(np.array([[2]])))[0] < -0.2, "max-autotune inherits the loss of compiling"


def test_conditioning_on_expected_results_equals_a_new_fit_with_them():
    places, more = [0, 3, 1, 2], [6, 12, 17]
    model, features = fitted(places, truth(CODES[places])), CODING.features(CODES[more])
    noise = np.array([1.0, 2.0, 8.0])
    quick = model.conditioned(features, noise)
    whole = LinearModel(
        CODING.features(CODES[places + more]),
        np.concatenate([truth(CODES[places]), model.mean(features)]),
        noise=np.concatenate([np.ones(len(places)), noise]),
        scales=model.scales,
        prior_level=float(np.mean(truth(CODES[places]))),
    )
    beside = CODING.features(CODES[:1])
    assert quick.mean(everywhere()) == pytest.approx(model.mean(everywhere()))
    assert quick.mean(everywhere()) == pytest.approx(whole.mean(everywhere()))
    for found, fit in zip(quick.variances(everywhere(), beside), whole.variances(everywhere(), beside), strict=True):
        assert found == pytest.approx(fit, abs=1e-9)
    assert quick.left_out_errors() == pytest.approx(whole.left_out_errors(), abs=1e-9)
    assert model.conditioned(features[[]], noise[[]]) is model


def test_rate_that_grows_with_batches_of_thousands_is_expected_to_grow_further():
    """On a made-up H100, a program with batches of 256 to 4096 was compiled twice before its batch was raised."""
    coding = Coding({BATCH: CategoricalDistribution([256, 1024, 4096])})
    model = LinearModel(coding.features(np.array([[0], [1]])), np.log([1.0, 4.0]))
    assert model.mean(coding.features(np.array([[2]])))[0] > np.log(4.0 * 1.5)


def test_batch_may_interact_more_with_other_knobs_the_more_doublings_it_has():
    few, many = (Levelled(BATCH, tuple(64 * 2**n for n in range(count)), True).pair_columns()[-2] for count in (2, 6))
    assert many @ many == pytest.approx(5 * few @ few, rel=0.02)
