"""Converts user input into a knob's value, or explains why it is invalid."""

from __future__ import annotations

import math
import re
from typing import Any

from autotune.errors import BadInput, one_of
from autotune.knobs.base import HostContext, Knob
from autotune.records import KnobValue

MAX_TEXT = 4096
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def value_of(knob: Knob, raw: Any, host_context: HostContext | None = None) -> KnobValue:
    """Returns `raw` as a value of `knob`.

    YAML 1.1 reads a bare `off` as False. So False is read as the word "off" if "off" is among the knob's choices. Likewise,
    True and False are read as the words "true" and "false" if these are among the choices.

    Args:
        knob: the knob.
        raw: the input: parsed YAML, a parsed override, or text.
        host_context: the machine whose bounds apply; None skips the checks of `Knob.bounds` and `Knob.numbers`.

    Raises:
        BadInput: the value has the wrong type, is not among the choices, or exceeds what this machine can serve.
    """
    value = _READERS[knob.type](knob, raw)
    if host_context is not None and isinstance(value, int | float) and not isinstance(value, bool):
        _check_bounds(knob, value, host_context)
        _check_numbers(knob, value)
    return value


def _bool(knob: Knob, raw: Any) -> KnobValue:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.strip().lower() in WORDS:
        return WORDS[raw.strip().lower()]
    raise BadInput(f"{knob.key}: not true or false, got {shown(raw)}. Allowed: true, false.")


def _int(knob: Knob, raw: Any) -> KnobValue:
    if isinstance(raw, float) and raw.is_integer():
        return int(raw)
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and re.fullmatch(r"[+-]?\d{1,20}", raw, re.ASCII):
        return int(raw)
    raise BadInput(f"{knob.key}: not a whole number, got {shown(raw)}. Give one, or a sweep such as choice(1,2,4).")


def _float(knob: Knob, raw: Any) -> KnobValue:
    try:
        value = math.nan if isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise BadInput(f"{knob.key}: not a number, got {shown(raw)}. Give one, or a sweep such as choice(0.5,0.8).")
    return value


def _str(knob: Knob, raw: Any) -> KnobValue:
    text = _text(raw)
    if text is None or "\0" in text or len(text) > MAX_TEXT:
        allowed = f"Allowed: {', '.join(knob.choices)}." if knob.choices else f"Allowed: text of at most {MAX_TEXT} characters."
        raise BadInput(f"{knob.key}: not usable text, got {shown(raw)}. {allowed}")
    if not knob.choices:
        return text
    word = next((word for word in _MEANT.get(text.lower(), ()) if word in knob.choices), text)
    if word not in knob.choices:
        raise BadInput(f"{knob.key}: no such value, got {shown(raw)}. {one_of(word, knob.choices)}")
    return word


def _text(raw: Any) -> str | None:
    if isinstance(raw, bool):
        return str(raw).lower()
    return str(raw) if isinstance(raw, str | int | float) else None


_MEANT = {"true": ("true",), "false": ("false", "off")}  # YAML word -> choices that it may mean, likeliest first
_READERS = {bool: _bool, int: _int, float: _float, str: _str}


def _check_bounds(knob: Knob, value: float, host_context: HostContext) -> None:
    low, high = knob.bounds(host_context)
    if knob.type is float and low is not None and high is not None and not low <= value <= high:
        raise BadInput(f"{knob.key}: out of range, got {shown(value)}. Allowed: {low} to {high}.")
    if low is not None and value < low:
        raise BadInput(f"{knob.key}: too small, got {shown(value)}. Allowed: {low} and more.")
    if high is not None and value > high:
        least = low if low is not None else "..."
        is_of_cores = knob.key == "loader.num_workers" or knob.key.startswith("threads.")
        cores = f"{host_context.num_cores} effective core{'' if host_context.num_cores == 1 else 's'}"
        why = f"more than {cores} can serve" if is_of_cores else "too large"
        raise BadInput(f"{knob.key}: {why}, got {shown(value)}. Allowed: {least} to {high}.")


def _check_numbers(knob: Knob, value: float) -> None:
    if knob.numbers and value not in knob.numbers:
        near = sorted(sorted(knob.numbers, key=lambda number: abs(number - value))[:6])
        allowed = ", ".join(map(str, near)) if len(near) == len(knob.numbers) else f"..., {', '.join(map(str, near))}, ..."
        raise BadInput(f"{knob.key}: no such value, got {shown(value)}. Allowed: {allowed}. Give one of them.")


def shown(raw: Any) -> str:
    """Returns a value as it appears in a message: text is quoted, long values are cut."""
    text = repr(raw)
    return text if len(text) <= 80 else f"{text[:77]}..."
