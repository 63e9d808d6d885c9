"""Reads dataclasses from plain JSON values (`dataclasses.asdict` writes them), and changes all values of a document."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

MAX_INT = 1 << 63
_Made = TypeVar("_Made")


def from_json(raw: Any, kind: type[_Made]) -> _Made:
    """Returns a JSON value as a dataclass. Unknown keys are ignored, and missing ones get their default.

    Raises:
        TypeError: the value has another type, or a key without default is missing.
        ValueError: a dict that must have integer keys has another key, or a value is not among the allowed ones.
    """
    return typing.cast(_Made, _value(raw, kind))


def mapped(document: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a document with `change` applied to each value that is neither an object nor a list; tuples become lists."""
    if isinstance(document, dict):
        return {key: mapped(value, change) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [mapped(value, change) for value in document]
    return change(document)


def _value(raw: Any, kind: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        given, make = _expected(raw, dict), typing.cast(Any, kind)
        return make(**{name: _named(given[name], hint, name) for name, hint in _hints(make).items() if name in given})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if raw is None and type(None) in arguments:
            return None
        return _first(raw, [each for each in arguments if each is not type(None)])
    if origin is list:
        return [_value(item, arguments[0]) for item in _expected(raw, list)]
    if origin is tuple and arguments[1:] == (...,):
        return tuple(_value(item, arguments[0]) for item in (raw if isinstance(raw, tuple) else _expected(raw, list)))
    if origin is tuple:
        items = raw if isinstance(raw, tuple) else _expected(raw, list)  # `asdict` keeps tuples, and JSON has lists
        return tuple(_value(item, each) for item, each in zip(items, arguments, strict=True))
    if origin is dict:
        return {arguments[0](name): _value(item, arguments[1]) for name, item in _expected(raw, dict).items()}
    if isinstance(kind, enum.EnumType):
        return kind(raw)
    if kind is float:
        return float(_expected(raw, (int, float)))
    if origin is Literal and raw not in arguments:
        raise ValueError(f"{raw!r:.40} instead of {' or '.join(map(str, arguments))}")
    return raw if kind is Any or origin is Literal else _expected(raw, kind)


def _first(raw: Any, kinds: Sequence[Any]) -> Any:
    """Returns a value converted to the first of `kinds` that it fits."""
    for kind in kinds[:-1]:
        with contextlib.suppress(TypeError, ValueError):
            return _value(raw, kind)
    return _value(raw, kinds[-1])


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _named(raw: Any, hint: Any, name: str) -> Any:
    try:
        return _value(raw, hint)
    except (TypeError, ValueError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from None


def _expected(raw: Any, kind: Any) -> Any:
    if isinstance(raw, int) and abs(raw) >= MAX_INT:
        raise ValueError("a number that is too large")
    if not isinstance(raw, kind) or (isinstance(raw, bool) and kind is not bool):
        what = "object" if kind is dict else getattr(kind, "__name__", "number")
        raise TypeError(f"{type(raw).__name__} instead of {what}")
    return raw
