"""Knob documentation as `autotune knobs [NAME]` prints it."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.knobs.base import Circumstances, Knob
from autotune.knobs.catalogue import CATALOGUE, knob
from autotune.knobs.environment import PREFIX

TIER_MEANS = {
    "exact": "same mathematics and sample distribution",
    "numerics": "same optimisation, other rounding",
    "training": "changes the optimisation",
}
# What a trial with it needs of its start; see `launch.warm`.
FRESH = "Read before torch is imported: a trial with it starts in a fresh interpreter."
WARM = "Set once torch has been imported: a trial with it may start warm."
_SOME: dict[type, bool | int | float | str] = {bool: True, int: 1, float: 0.5, str: "x"}


@dataclass(frozen=True)
class Row:
    """One line of the overview: key, tier, values, and the first sentence of the summary."""

    key: str
    tier: str
    values: str
    summary: str


def overview() -> list[Row]:
    """Returns one row per knob, env.NAME last."""
    return [
        Row(key=name, tier=k.tier.value, values=_values(k), summary=_first_sentence(k.summary))
        for name, k in [*CATALOGUE.items(), ("env.NAME", knob("env.NAME"))]
    ]


def describe(key: str, circumstances: Circumstances | None = None) -> str:
    """Returns a knob's documentation as Markdown.

    Args:
        key: the knob's key; "env.NAME" for any environment variable.
        circumstances: the machine to name the tried values for; None leaves them out.

    Raises:
        BadInput: there is no such knob; names the nearest.
    """
    found = knob(key)
    parts = [
        f"# {found.key}",
        found.summary,
        f"**When it helps.** {found.helps}",
        f"**When it hurts.** {found.hurts}",
        f"**Start-up cost.** {_sentence(found.start_cost)}",
        f"**Start.** {_start(found)}",
        f"**Tier.** {found.tier}: {TIER_MEANS[found.tier]}.",
        f"**Values.** {_values(found)}; a program that says nothing has {_default(found)}.",
    ]
    if circumstances is not None:
        parts.append(f"**On this machine.** {_here(found, circumstances)}")
    parts.append(f"**Use.** `{found.key}={_example(found)}` pins it, `{found.key}=choice(...)` tunes it over those values.")
    return "\n\n".join(parts) + "\n"


def _here(found: Knob, circumstances: Circumstances) -> str:
    if reason := found.blocked(circumstances):
        return f"Not turned: {reason}."
    tried = found.domain(circumstances)
    return f"Tried: {', '.join(map(_word, tried))}." if tried else "Nothing is tried until you list values."


def _start(found: Knob) -> str:
    is_fresh = found.needs_fresh_start(found.choices[-1] if found.choices else _SOME[found.type])
    return FRESH if is_fresh else WARM


def _values(found: Knob) -> str:
    if found.type is bool:
        return "true, false"
    return ", ".join(found.choices) or {int: "a whole number", float: "a number"}.get(found.type, "any text")


def _example(found: Knob) -> str:
    least = found.bounds(Circumstances(num_cores=8))[0] or 0
    numbers = {bool: "true", int: str(max(4, least)), float: "0.5"}
    return numbers.get(found.type, found.choices[-1] if found.choices else "VALUE")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _default(found: Knob) -> str:
    if found.key.startswith(PREFIX):
        return "what your shell has"
    is_library_s = found.key.startswith("nccl.") or (found.key.startswith("threads.") and found.type is int)
    return "the library's choice" if is_library_s else _word(found.default)


def _first_sentence(text: str) -> str:
    head, stop, _ = text.partition(". ")
    return head + "." if stop else head


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
