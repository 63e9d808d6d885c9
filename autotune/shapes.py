"""Checks JSON documents that were read from disk: a file may be cut off, edited, or written by another program.

A shape is one of these: a function that tells whether a value is right (`number`); `[shape]` for a list; `(None, shape)` for a
value that may be null; {key: shape} for a dictionary. If the key is "name?", "name" may be missing or null, and if its shape is
a dictionary, "name" may also be {}, whatever keys that shape requires. ANY stands for all keys. Keys that are not in a shape
are not checked, because later versions add keys.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

ANY = "*"
# No time, size or rate is larger; arithmetic on larger numbers could overflow. A loss may be larger: see `clipped`.
MAX_NUMBER = 1e30
FINITE = (str, int, bool, type(None))  # types whose values are always finite; most values of a document have one of them
LAST_MOMENT = 253_402_300_799  # end of the year 9999, in seconds since the epoch


class _Misfit(Exception):
    """A value does not have the expected shape.

    Attributes:
        words: what is wrong.
        keys: where the value stands, the innermost key first.
    """

    def __init__(self, words: str) -> None:
        self.words = words
        self.keys: list[object] = []


def check(value: Any, shape: Any, place: str = "") -> None:
    """Checks a value of a document.

    Args:
        value: the value.
        shape: its shape.
        place: where it stands in the document, "trials.3.value"; "" for the document itself.

    Raises:
        ValueError: it has another shape; the message begins with the place of the first difference.
    """
    try:
        _check(value, shape)
    except _Misfit as misfit:
        where = ".".join(map(str, [*([place] if place else []), *reversed(misfit.keys)]))
        raise ValueError(f"{where}: {misfit.words}" if where else misfit.words) from None


def _check(value: Any, shape: Any) -> None:
    # The place is put together only if something is wrong, because `autotune list` may check a thousand summaries.
    kind = type(shape)
    if kind is dict:
        _expect(isinstance(value, dict), "mapping", value)
        _check_keys(value, shape)
    elif kind is tuple:
        if value is not None:
            _check(value, shape[1])
    elif kind is list:
        _expect(isinstance(value, list), "list", value)
        for number, item in enumerate(value):
            _check_at(number, item, shape[0])
    elif not shape(value):
        _expect(False, shape.__name__.replace("_", " "), value)


def _check_keys(value: dict[str, Any], shape: dict[str, Any]) -> None:
    for name, inner in shape.items():
        is_optional = name[-1] == "?"
        key = name[:-1] if is_optional else name
        if key == ANY:
            for each, item in value.items():
                _check_at(each, item, inner)
        elif key in value:
            found = value[key]
            if not (is_optional and (found is None or (found == {} and isinstance(inner, dict)))):
                _check_at(key, found, inner)
        elif not is_optional:
            misfit = _Misfit("missing")
            misfit.keys.append(key)
            raise misfit


def _check_at(key: object, value: Any, shape: Any) -> None:
    if type(shape) is FunctionType and shape(value):
        return  # most values end here, which saves a call of `_check` for each
    try:
        _check(value, shape)
    except _Misfit as misfit:
        misfit.keys.append(key)
        raise


def _expect(is_right: bool, what: str, value: Any) -> None:
    if not is_right:
        raise _Misfit(f"expected {what}, got {value!r:.80}")


def finite(document: Any) -> Any:
    """Returns a JSON document with None in place of each number that is not finite, and of each list with such a number."""
    if isinstance(document, dict):
        return {name: value if type(value) in FINITE else finite(value) for name, value in document.items()}
    if isinstance(document, list):
        return None if any(map(_is_odd, document)) else [item if type(item) in FINITE else finite(item) for item in document]
    return None if _is_odd(document) else document


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def clipped(value: float) -> float:
    """Returns a number, or the nearest one that a document may hold: the loss of a training that diverges may be larger."""
    return max(-MAX_NUMBER, min(MAX_NUMBER, value))


# Kinds of values; a message calls each by its function's name ---------------------------------------------------------------


def text(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool)


def number(value: Any) -> bool:
    """Whether it is a number that can be computed with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def whole_number(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and number(value)


def ratio(value: Any) -> bool:
    """Whether it is a ratio of two rates."""
    return number(value) and value >= 0


def moment(value: Any) -> bool:
    """Whether it is a number of seconds since the epoch."""
    return number(value) and 0 <= value <= LAST_MOMENT


def interval(value: Any) -> bool:
    """Whether it is a list of two numbers."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(number, value))


def open_interval(value: Any) -> bool:
    """Whether it is an interval whose upper end may be unknown."""
    return isinstance(value, list | tuple) and len(value) == 2 and number(value[0]) and (value[1] is None or number(value[1]))


def knob_value(value: Any) -> bool:
    """Whether it is a value that a knob may have; null stands for an unknown value."""
    return value is None or isinstance(value, str | bool) or number(value)
