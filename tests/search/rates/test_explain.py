import pytest

from autotune.search.rates.reasons import changes, gain, risk

BEST = {"loader.batch_size": 32, "loader.num_workers": 8, "precision.amp": "off", "loader.pin_memory": False}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"loader.num_workers": 12}, "workers 8 -> 12"),
        ({"precision.amp": "bf16", "loader.batch_size": 64}, "batch 32 -> 64, fp32 -> bf16"),
        ({"loader.pin_memory": True}, "pin_memory"),
        ({"loader.prefetch_factor": 4}, "prefetch 4"),
        ({}, "the same"),
    ],
)
def test_changes_are_described_in_short_words(changed, text):
    assert changes(BEST, {**BEST, **changed}) == text


def test_changes_beyond_the_fourth_are_only_counted():
    assert changes({}, {f"env.A{n}": n for n in range(6)}) == "A0=0, A1=1, A2=2, A3=3 and 2 more"


@pytest.mark.parametrize(
    ("expected", "possible", "text"),
    [
        (0.141, 0.3, "+14 % expected"),
        (-0.24, 0.09, "up to +9 %"),
        (-0.24, 10.8, "gain unknown"),
        (-0.24, -0.1, "little gain expected"),
        (0.0, 0.0, "little gain expected"),
    ],
)
def test_expected_gain_is_described_in_words(expected, possible, text):
    assert gain(expected, possible) == text


def test_low_chance_to_fit_the_memory_is_added_to_the_gain_text():
    assert gain(0.97, 1.2) + risk(0.104) == "+97 % expected, 10 % likely to fit the memory"
