"""Parses domains: Hydra's sweep expressions on the command line, and search-space files."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.errors import HydraException

from autotune.config import yaml_file
from autotune.config.keys import no_such
from autotune.config.locate import folder, options
from autotune.errors import BadInput
from autotune.knobs.base import HostContext, Knob
from autotune.knobs.catalogue import CATALOGUE, clash_words, clashes, is_knob, knob
from autotune.knobs.catalogue import GROUPS as KNOB_GROUPS
from autotune.knobs.environment import PREFIX
from autotune.knobs.values import MAX_TEXT, shown, value_of
from autotune.records import KnobValue
from autotune.space import Choice, Domain, IntInterval

MAX_VALUES = 256  # maximum length of a domain's list; more could not be searched, and range(0,10**12) would fill memory
KEY = re.compile(r"(\+\+?|~)?[A-Za-z_][\w-]*([./][A-Za-z_][\w-]*)*([@:][\w.:-]*)?", re.ASCII)
CALL = re.compile(r"\w+[\[({]([\w., -]*)[\])}]")  # a misspelt choice(1,2): choise(1,2), choice[1,2]
MAX_KEY = 200  # characters
NOTHING = "none"  # the search space with only the command line's domains
FORMS = "Give choice(a,b,c), range(start,stop,step), interval(low,high) or tag(log,interval(low,high))."


def domain_of(found: Knob, override: Override, host_context: HostContext) -> Domain:
    """Returns the domain of a sweep expression.

    `range` excludes the stop, as in Hydra. `interval` on whole numbers includes both ends, as in Hydra's Optuna sweeper.

    Raises:
        BadInput: the domain is empty, contradictory, of the wrong type, or beyond this machine's bounds.
    """
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        return _interval(found, sweep, host_context)
    if not isinstance(sweep, ChoiceSweep | RangeSweep):
        raise BadInput(f"{found.key}: not a domain, got {shown(_written(override))}. {FORMS}")
    if sweep.tags:
        raise BadInput(f"{found.key}: a tag, which only an interval can have, got {shown(_written(override))}. {FORMS}")
    return choice(found, _elements(found, sweep, _written(override)), host_context)


def choice(found: Knob, raw: Iterable[Any], host_context: HostContext) -> Choice:
    """Returns the domain of listed values.

    Raises:
        BadInput: the list is empty or too long, or contains unusable values; lists every unusable value.
    """
    listed = list(itertools.islice(raw, MAX_VALUES + 1))
    if not listed:
        raise BadInput(f"{found.key}: an empty domain. Give at least one value: {found.key}=choice(...).")
    if len(listed) > MAX_VALUES:
        got = f"{listed[0]!r}, {listed[1]!r}, ..."
        raise BadInput(f"{found.key}: more than {MAX_VALUES} values, got {got}. Give fewer, or an interval(low,high).")
    values: list[KnobValue] = []
    problems = []
    for item in listed:
        try:
            value = value_of(found, item, host_context)
        except BadInput as error:
            problems += error.problems
            continue
        values += [] if value in values else [value]
    if problems:
        raise BadInput(problems)
    return Choice(tuple(values))


def read_space(name: str, host_context: HostContext) -> dict[str, Domain | None]:
    """Returns knob key -> domain from a search-space file; None stands for the domain "auto". {} for NOTHING.

    Args:
        name: a name in search_spaces/, a path (anything with a slash or ending in .yaml or .yml), or NOTHING.
        host_context: the machine whose bounds apply.

    Raises:
        BadInput: no such file, not a mapping, unknown knobs or unusable domains; lists every problem.
    """
    if name == NOTHING:
        return {}
    path = _space_path(name)
    document = yaml_file.read(path, "search_space")
    if not isinstance(document, dict) or not document:
        problem = f"search_space: not a mapping of knob to domain, got {shown(document)} in {str(path)!r}."
        raise BadInput(f"{problem} See search_spaces/default.yaml.")
    domains: dict[str, Domain | None] = {}
    problems = []
    for key, asked in _flat(document).items():
        try:
            domains[str(key)] = _entry(str(key), asked, host_context)
        except BadInput as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    problems += [f"{path}: {clash_words(*pair)}" for pair in clashes(domains)]
    if problems:
        raise BadInput(problems)
    return domains


def keys_of_spaces() -> dict[str, list[str]]:
    """Returns name of search space -> keys of its knobs."""
    place = folder("search_spaces")
    return {
        name: [str(key) for key in yaml_file.read(place / f"{name}.yaml", name)]
        for name in options("search_spaces", [place.parent])
    }


def _flat(document: dict[Any, Any]) -> dict[str, Any]:
    """Returns a search space with dotted keys: `loader: {batch_size: auto}` becomes `loader.batch_size: auto`."""
    flat: dict[str, Any] = {}
    for key, asked in document.items():
        is_group = isinstance(asked, dict) and asked and key in KNOB_GROUPS
        inner = {f"{key}.{name}": value for name, value in asked.items()} if is_group else {str(key): asked}
        if twice := flat.keys() & inner.keys():
            raise BadInput(f"{min(twice)}: given twice, inside its group and under its full name. Give one.")
        flat |= inner
    return flat


def _entry(key: str, asked: Any, host_context: HostContext) -> Domain | None:
    if not is_knob(key):
        raise BadInput(no_such("knob", key, CATALOGUE, "knob"))
    found = knob(key)
    if asked == "auto" and not key.startswith(PREFIX):
        return None
    if isinstance(asked, list):
        return choice(found, asked, host_context)
    if isinstance(asked, str):
        override = parse(f"{key}={asked}")
        if override.is_sweep_override():
            return domain_of(found, override, host_context)
    raise BadInput(
        f"{key}: not a domain, got {shown(asked)}. Allowed: {'' if key.startswith(PREFIX) else 'auto, '}a list of values, or a "
        'sweep such as "choice(0,4,8)".'
    )


def parse(text: str) -> Override:
    """Returns a parsed KEY=VALUE override.

    Raises:
        BadInput: the text does not follow Hydra's override grammar.
    """
    key, equals, value = text.partition("=")
    if "\0" in text:
        raise BadInput(f"{shown(text)}: a NUL character, which no value can have. Give KEY=VALUE.")
    if equals and len(key) > MAX_KEY:
        raise BadInput(f"{shown(key)}: no such key, it has {len(key)} characters, got {shown(value)}. Give KEY=VALUE.")
    if not KEY.fullmatch(key):
        raise BadInput(f"{shown(text)}: no key before the '=', or a key with characters that keys cannot have. Give KEY=VALUE.")
    key = key.lstrip("+")
    if key in options("model", [folder("conf")]) and not equals:
        raise BadInput(f"{shown(text)}: not KEY=VALUE, there is no '='. Write model={key}.")
    if not equals and not key.startswith("~"):
        raise BadInput(f"{shown(text)}: not KEY=VALUE, there is no '='. Give KEY=VALUE; a command to tune goes after --.")
    if len(text) > MAX_TEXT:
        raise BadInput(f"{key}: too long, {len(text)} characters, got {shown(value)}. Allowed: {MAX_TEXT}. Put it into a file.")
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:
        if value.replace(" ", "") == "choice()":
            raise BadInput(f"{key}: an empty domain, got {shown(text)}. Give at least one value: {key}=choice(...).") from error
        if missing := value.count("(") - value.count(")"):
            end = "its closing bracket is missing" if missing > 0 else "it has a closing bracket without an opening one"
            whole = f"{value.rstrip(', ')}{')' * missing}"
            meant = f" Did you mean '{key}={whole}'?" if missing > 0 and "()" not in whole else ""
            raise BadInput(f"{key}: {end}, got {shown(value)}.{meant} Quote it for the shell: '{key}=choice(...)'.") from error
        is_plain = value.isprintable() and len(value) <= 60 and not set(value) & set("'\"$`\\!")
        quoted = f"Text with special characters is quoted twice: \"{key}='{value if is_plain else '...'}'\"."
        if is_knob(key) and (call := CALL.fullmatch(value)):
            quoted = f"Values to try are written {key}=choice({call[1]})."
        raise BadInput(f"{key}: not a value in Hydra's grammar, got {shown(value)}{_where(error)}. {quoted}") from error


def _where(error: BaseException) -> str:
    """Returns what Hydra's parser could not parse, as text in parentheses; "" if unknown."""
    text = " ".join(str(error.__cause__ or error).split())
    letter = re.search(r"LexerNoViableAltException\('(.)'\)", text)
    if letter:
        return f" (the character {letter[1]!r})"
    return f" ({text.partition(' expecting ')[0]})" if text and text != "None" and len(text) < 200 else ""


def _space_path(name: str) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(os.path.expanduser(name))
    folders = [folder("search_spaces").parent]
    names = options("search_spaces", folders)
    if name not in names:
        problem = no_such("search_space", name, [*names, NOTHING], "search space")
        raise BadInput(f"{problem} Or give a path to a YAML file.")
    return folder("search_spaces") / f"{name}.yaml"


def _elements(found: Knob, sweep: ChoiceSweep | RangeSweep, written: str) -> list[Any]:
    if isinstance(sweep, ChoiceSweep):
        listed = _as_typed(sweep.list, written) if found.key.startswith(PREFIX) else sweep.list
        return [item.text if isinstance(item, QuotedString) else item for item in listed]
    try:
        values = list(itertools.islice(sweep.range(), MAX_VALUES + 1))
    except (HydraException, ValueError, ArithmeticError) as error:
        raise BadInput(f"{found.key}: a range without an end, got {written!r}. {FORMS}") from error
    if not values:
        raise BadInput(
            f"{found.key}: an empty domain, got {written!r}. Swap start and stop, or change the sign of the step. {FORMS}"
        )
    return values


def _as_typed(values: list[Any], written: str) -> list[Any]:
    """Returns an environment variable's values as typed: "0.10" and "True" for `choice(0.10,True)`, not 0.1 and "true"."""
    inside = written.removeprefix("choice(").removesuffix(")")
    words = [word.strip() for word in inside.split(",")]
    if "(" in inside or len(words) != len(values):  # sort(...), or a comma in quotes: words and values do not correspond
        return values
    return [word if isinstance(value, bool | int | float) else value for value, word in zip(values, words, strict=True)]


def _interval(found: Knob, sweep: IntervalSweep, host_context: HostContext) -> IntInterval:
    written = f"interval({sweep.start:g},{sweep.end:g})"
    ends = [float(sweep.start or 0), float(sweep.end or 0)]  # Hydra's parser always sets both
    if found.type is not int:
        raise BadInput(f"{found.key}: an interval needs a knob of whole numbers, got {written}. Give choice(...).")
    if sweep.tags - {"log"}:
        raise BadInput(f"{found.key}: no such tag, got {shown(', '.join(sorted(sweep.tags)))}. Allowed: log.")
    if not all(end.is_integer() for end in ends):
        raise BadInput(f"{found.key}: ends that are not whole numbers, got {written}. {FORMS}")
    if found.numbers:
        raise BadInput(f"{found.key}: takes only certain numbers, not all of an interval, got {written}. Give choice(...).")
    choice(found, ends, host_context)
    low, high = (int(end) for end in ends)
    if low > high:
        raise BadInput(f"{found.key}: an empty domain, got {written!r}. The lower end comes first: interval({high},{low}).")
    if "log" in sweep.tags and low < 1:
        raise BadInput(f"{found.key}: a logarithmic interval below 1, got {written}. Start at 1 or leave tag(log, ...) out.")
    return IntInterval(low, high, log="log" in sweep.tags)


def _written(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]
