"""Formats numbers for people: rates, durations, sizes, ratios. Stored data stays in SI units."""

from __future__ import annotations

from collections.abc import Sequence

DASH = "-"  # stands for an unknown value


def number_text(value: float | None, *, digits: int = 3) -> str:
    """Returns a number without exponent: "16.8", "1,234", "0.0123"; a dash for None.

    It has at least `digits` significant digits. Below 0.0001, it has at most `digits` + 3 decimals, so perhaps fewer digits.
    """
    if value is None:
        return DASH
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    if "e" in text:
        return f"{value:.{digits + 3}f}".rstrip("0").rstrip(".") if value else "0"
    whole, _, fraction = text.partition(".")
    shown = len((whole + fraction).lstrip("-0"))
    return f"{whole}.{fraction}{'0' * max(0, digits - shown)}" if shown < digits and value else text


def compact_text(value: float | None) -> str:
    """Returns a number in six characters at most: "16.8", "92,877", "104k"; a dash for None."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if value is not None and value >= size:
            return f"{number_text(value / min(size, 1e3 if letter == 'k' else size))}{letter}"
    return number_text(value)


def rate_text(value: float | None, unit: str) -> str:
    """Returns a rate with its unit: "56.8 samples/s"."""
    return DASH if value is None else f"{number_text(value)} {unit}/s"


def interval_text(interval: Sequence[float] | None) -> str:
    """Returns a rate's interval, "[55.9, 57.7]"; "" without one. A low end below 0 (from few measurements) becomes 0."""
    return "" if interval is None else f"[{number_text(max(0.0, interval[0]))}, {number_text(interval[1])}]"


def bytes_text(value: float | None) -> str:
    """Returns bytes in the largest binary unit that keeps the number above 1: "1.42 GiB"."""
    if value is None:
        return DASH
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{number_text(value / size)} {unit}"
    return f"{value:.0f} B"


def flops_text(per_s: float) -> str:
    """Returns FLOPs per second in the largest unit that keeps the number above 1: "48.8 TFLOP/s", "3.90 GFLOP/s"."""
    unit, size = next(((unit, size) for unit, size in (("T", 1e12), ("G", 1e9)) if per_s >= size), ("M", 1e6))
    return f"{number_text(per_s / size)} {unit}FLOP/s"


def step_time_text(seconds: float) -> str:
    """Returns the duration of a step, or of a part of a step: "12.3 ms", "1.2 s", "2.69 us"."""
    if 0 < seconds < 1e-4:
        return f"{number_text(1e6 * seconds)} us"
    return f"{number_text(1e3 * seconds)} ms" if seconds < 1 else f"{number_text(seconds)} s"


def seconds_text(value: float | None) -> str:
    """Returns a duration as one would say it: "8.2 s", "3 min 20 s", "1 h 05 min"."""
    if value is None:
        return DASH
    if round(value, 1) < 10:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if not minutes:
        return f"{seconds} s"
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s" if seconds else f"{minutes} min"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def clock_text(value: float) -> str:
    """Returns a remaining time as "7:32" or "1:07:32"; "0:00" for a negative one."""
    minutes, seconds = divmod(max(0, int(value)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def percent_text(fraction: float | None, *, digits: int = 0) -> str:
    """Returns a fraction in percent: "38 %"; a dash for None."""
    return DASH if fraction is None else f"{100 * fraction:.{digits}f} %"


def share_text(share: float | None) -> str:
    """Returns a share in percent, with one decimal; "under 0.1 %" for a share above 0 that would be rounded to 0.0 %."""
    return "under 0.1 %" if share and 0 < share < 0.0005 else percent_text(share, digits=1)


def ratio_text(ratio: float | None) -> str:
    """Returns a speed-up: "2.41x"."""
    return DASH if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{number_text(ratio)}x"


def ratio_interval_text(interval: Sequence[float] | None) -> str:
    """Returns a speed-up's interval with two decimals, like the ratio itself: "[2.36, 2.46]"; "" without one."""
    return "" if interval is None else f"[{max(0.0, interval[0]):.2f}, {interval[1]:.2f}]"


def ratio_with_interval_text(ratio: float | None, interval: Sequence[float] | None) -> str:
    """Returns a speed-up and its interval: "2.41x [2.36, 2.46]", "2.41x"."""
    return f"{ratio_text(ratio)} {ratio_interval_text(interval)}".strip()


def rate_with_interval_text(value: float | None, interval: Sequence[float] | None, unit: str) -> str:
    """Returns a rate with its unit and its interval: "56.8 samples/s [55.9, 57.7]", "56.8 samples/s"."""
    return f"{rate_text(value, unit)} {interval_text(interval)}".strip()
