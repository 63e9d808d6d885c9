"""JSON documents are read into dataclasses; values of another type are refused."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest

from autotune.plain_json import from_json


class Colour(enum.Enum):
    red = "red"


@dataclass
class Inner:
    size: int = 0


@dataclass
class Outer:
    colour: Colour = Colour.red
    kind: Literal["a", "b"] = "a"
    one: bool | int | float | str = 0
    several: str | list[str] = ""
    pairs: tuple[tuple[int, float], ...] = ()
    maybe: Inner | None = None
    numbers: dict[str, float] = field(default_factory=dict)


def test_values_are_read_with_their_original_types():
    made = Outer(Colour.red, "b", True, ["x"], ((1, 0.5), (2, 1.0)), Inner(3), {"a": 1.0})
    assert from_json({**asdict(made), "colour": "red", "pairs": [[1, 0.5], [2, 1]], "later": 1}, Outer) == made
    assert type(from_json({"one": 1}, Outer).one) is int


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "list instead of object"),
        ({"colour": "blue"}, "colour: 'blue' is not a valid Colour"),
        ({"kind": "c"}, "kind: 'c' instead of a or b"),
        ({"kind": []}, r"kind: \[\] instead of a or b"),
        ({"one": None}, "one: NoneType instead of str"),
        ({"several": [1]}, "several: int instead of str"),
        ({"pairs": [[1]]}, "pairs: "),
        ({"pairs": 3}, "pairs: int instead of list"),
        ({"maybe": {"size": True}}, "maybe: size: bool instead of int"),
        ({"maybe": {"size": 10**30}}, "maybe: size: a number that is too large"),
        ({"numbers": {"a": 10**400}}, "numbers: a number that is too large"),
    ],
)
def test_error_for_a_value_of_the_wrong_type_names_its_key(raw: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        from_json(raw, Outer)
