"""Checks of documents: an error names its place in the document."""

import math

import pytest

from autotune.documents import parsed
from autotune.shapes import ANY, check, finite, interval, knob_value, moment, number, ratio, text, whole_number

SHAPE = {
    "name": text, "ci?": interval, "sides?": {"value": (None, number)}, "trials": [{"number": whole_number}],
    "by?": {ANY: ratio},
}  # fmt: skip
RIGHT = {"name": "a", "ci": [1, 2.5], "sides": {"value": None}, "trials": [{"number": 0}], "by": {"x": 2.0}, "later": object()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 3}, "name: expected text, got 3"),
        ({"ci": [1]}, r"ci: expected interval, got \[1\]"),
        ({"sides": {}}, None),
        ({"sides": None, "ci": None, "by": {}}, None),
        ({"sides": {"x": 1}}, "sides.value: missing"),
        ({"trials": [{"number": 0}, {"number": True}]}, "trials.1.number: expected whole number, got True"),
        ({"trials": {}}, r"trials: expected list, got \{\}"),
        ({"trials": None}, "trials: expected list, got None"),
        ({"by": {"x": -1.0}}, "by.x: expected ratio, got -1.0"),
        ({"by": 7}, "by: expected mapping, got 7"),
    ],
)
def test_error_names_the_place_of_the_first_wrong_value(changes, message):
    check(RIGHT, SHAPE)
    if message is None:
        check({**RIGHT, **changes}, SHAPE)
    else:
        with pytest.raises(ValueError, match=f"^{message}$"):
            check({**RIGHT, **changes}, SHAPE)


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, True, "2", None])
def test_infinite_huge_and_non_numeric_values_are_not_numbers(value):
    assert not number(value)
    assert not moment(value)


def test_a_knob_may_have_any_plain_value():
    assert all(map(knob_value, (None, True, 3, 0.5, "bf16")))
    assert not any(map(knob_value, ([], {}, math.nan)))


def test_finite_replaces_non_finite_numbers_and_their_lists_with_none():
    found = finite({"a": math.nan, "b": [1.0, math.inf], "c": [{"d": -math.inf}, 2]})
    assert found == {"a": None, "b": None, "c": [{"d": None}, 2]}


def test_parsed_replaces_non_finite_numbers_and_their_lists_with_none():
    assert parsed('{"a": 1e999, "b": [1.5, NaN], "c": 1e308, "d": -Infinity}') == {"a": None, "b": None, "c": 1e308, "d": None}
    assert parsed('{"c": [1e308, 2]}') == {"c": [1e308, 2]}
