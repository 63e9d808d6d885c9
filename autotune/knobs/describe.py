"""Formats the knobs' documentation for `autotune knobs [NAME]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autotune.knobs.base import HostContext, Knob, value_text
from autotune.knobs.catalogue import CATALOGUE, knob
from autotune.knobs.environment import PREFIX
from autotune.knobs.loader import BATCH_SIZE
from autotune.records import KnobValue

TIER_MEANS = {
    "exact": "same mathematics and sample distribution",
    "numerics": "same optimisation, other rounding",
    "training": "changes the optimisation",
}
# How a trial that sets the knob may start; see `launch.warm`.
FRESH = "Read before torch is imported, so trials that set it start in a fresh interpreter."
WARM = (
    "Set after torch is imported, so a trial with it may be forked from a process that has imported torch already, which saves "
    "time (`launch.warm`)."
)
SOME_FRESH = (
    "A trial starts in a fresh interpreter if a value sets {}. With any other value, it may be forked from a process that has "
    "imported torch already, which saves time (`launch.warm`)."
)

PAGE_HEAD = """# Which settings can autotune change?

Every setting ("knob"), by family. `autotune knobs` says which of them cannot be set on your machine, and `autotune knobs NAME`
which values of a knob would be tried there. This page is made by `autotune knobs --page`.
"""


@dataclass(frozen=True)
class Row:
    """One line of the overview.

    Attributes:
        key: the knob's key.
        tier: what it changes besides speed.
        brief: a few words on what it is.
        blocked: why it cannot be set on this machine; None if it can.
    """

    key: str
    tier: str
    brief: str
    blocked: str | None = None


def overview(host_context: HostContext | None = None) -> dict[str, list[Row]]:
    """Returns {family: a row for each knob} in the catalogue's order, with env.NAME last.

    If no machine is given, no knob is blocked.
    """
    families: dict[str, list[Row]] = {}
    for key, found in [*CATALOGUE.items(), ("env.NAME", knob("env.NAME"))]:
        blocked = None if host_context is None else found.blocked(host_context)
        row = Row(key=key, tier=found.tier.value, brief=found.brief, blocked=blocked)
        families.setdefault(key.partition(".")[0], []).append(row)
    return families


def describe(key: str, host_context: HostContext | None = None, *, spaces: Mapping[str, Iterable[str]] | None = None) -> str:
    """Returns a knob's documentation as Markdown.

    Args:
        key: the knob's key; "env.NAME" for any environment variable.
        host_context: the machine whose candidate values are listed; None omits them.
        spaces: search space -> keys that it searches, to list the spaces that contain this knob; None omits them.

    Raises:
        BadInput: there is no such knob; the message names the nearest.
    """
    found = knob(key)
    parts = [
        f"# {found.key}",
        found.summary,
        f"**When it helps.** {found.helps}",
        f"**When it hurts.** {found.hurts}",
        f"**Start-up cost.** {_sentence(found.start_cost)}",
        f"**Start.** {_start(found)}",
        f"**Tier.** {_tier(found)}",
        f"**Values.** {_values(found)}. Default: {_default(found)}.",
    ]
    if spaces is not None:
        parts.append(f"**Searched.** {_searched(found, spaces)}")
    if host_context is not None:
        parts.append(f"**On this machine.** {_here(found, host_context)}")
    pin, tune = uses(found, host_context or HostContext(num_cores=8))
    parts.append(f"**Use.** `{pin}` pins it, `{tune}` tunes it over these values.")
    return "\n\n".join(parts) + "\n"


def page(spaces: Mapping[str, Iterable[str]]) -> str:
    """Returns docs/knobs.md: every knob by family, with the search spaces that search it, independent of this machine."""
    families, parts = overview(), [PAGE_HEAD]
    for family, rows in families.items():
        parts.append(
            f"- [{family}](#{family}): " + ", ".join(f"[`{row.key}`](#{row.key.lower().replace('.', '')})" for row in rows)
        )
    for family, rows in families.items():
        parts.append(f"\n## {family}\n")
        parts += [describe(row.key, spaces=spaces).replace("# ", "### ", 1) for row in rows]
    return "\n".join(parts).rstrip() + "\n"


def uses(found: Knob, host_context: HostContext) -> tuple[str, str]:
    """Returns two example arguments with allowed values, quoted for the shell: one pins the knob, the other tunes it."""
    values = found.examples or tuple(found.domain(host_context))
    if len(values) < 2:
        values = found.choices or found.numbers[:4] or tuple(found.domain(HostContext(num_cores=8)))
    if len(values) < 2 and found.type is bool:
        values = (False, True)
    other = next((value for value in reversed(values) if value != found.default), values[-1])
    return _argument(found.key, [other]), _argument(found.key, values)


def _argument(key: str, values: Iterable[KnobValue]) -> str:
    """Returns KEY=VALUE, or KEY=choice(...) for several values, with special characters quoted for Hydra and the shell."""
    words = [value_text(value) for value in values]
    quoted = [word if re.fullmatch(r"[\w./:+-]+", word) else f"'{word}'" for word in words]
    text = f"{key}={quoted[0]}" if len(quoted) == 1 else f"{key}=choice({','.join(quoted)})"
    if quoted != words:
        return f'"{text}"'
    return text if len(quoted) == 1 else f"'{text}'"


def _tier(found: Knob) -> str:
    means = f"{found.tier}: {TIER_MEANS[found.tier]}"
    if not found.is_unknown:
        return f"{means}."
    return f"{means}, if it works as intended. To be sure, losses are compared before a value of it may win."


def _searched(found: Knob, spaces: Mapping[str, Iterable[str]]) -> str:
    named = [name for name, keys in spaces.items() if found.key in keys]
    if not named:
        return "Only if you name it."
    others = [name for name in named if name != "default"]
    if len(others) < len(named):
        return f"By default{f', and with search_space={_listed(others)}' if others else ''}."
    return f"If you name it, or with search_space={_listed(others)}."


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _here(found: Knob, host_context: HostContext) -> str:
    if reason := found.blocked(host_context):
        return f"Not available: {reason}."
    if found.key == BATCH_SIZE.key:
        return "Tries half of the program's own batch size, the batch size itself, and its doublings."
    tried = found.domain(host_context)
    return f"Tries {', '.join(map(value_text, tried))}." if tried else "Tries nothing until you list values."


def _start(found: Knob) -> str:
    early = [name for name in found.variables if name not in found.set_later]
    if early and found.set_later:
        return SOME_FRESH.format(_listed(early))
    is_variable = bool(early) or found.key.startswith(PREFIX)
    return FRESH if is_variable or found.is_before_torch else WARM


def _values(found: Knob) -> str:
    if found.type is bool:
        return "true, false"
    if found.numbers:
        return ", ".join(map(str, found.numbers[:4])) + (f", ... {found.numbers[-1]}" if len(found.numbers) > 4 else "")
    return ", ".join(found.choices) or {int: "a whole number", float: "a number"}.get(found.type, "any text")


def _default(found: Knob) -> str:
    if found.key.startswith(PREFIX):
        return "what your shell sets"
    is_library_default = found.key.startswith("nccl.") or (found.key.startswith("threads.") and found.type is int)
    return "the library's choice" if is_library_default else found.default_text or value_text(found.default)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
