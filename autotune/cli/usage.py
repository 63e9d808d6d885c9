"""Rewords the CLI library's usage errors in the form of autotune's other messages."""

from __future__ import annotations

import re
from typing import Any

from autotune.errors import one_of

# Options that users know from other tools -> the configuration key to write here instead.
KEYS = {
    "--minutes": "study.budget.minutes=MINUTES",
    "--budget": "study.budget.minutes=MINUTES",
    "--trials": "study.budget.trials=N",
    "--name": "study.name=NAME",
    "--model": "model=NAME",
    "--data": "data=NAME",
    "--batch-size": "loader.batch_size=N",
    "--device": "device.kind=cpu or device.kind=cuda",
    "--seed": "study.seed=N",
    "-m": "KEY=choice(A,B), which tries the values",
    "--multirun": "KEY=choice(A,B), which tries the values",
    "--config-name": "+GROUP=NAME for a file in a --config-dir DIR",
    "--config-path": "--config-dir DIR",
}
OPTIONS = {"help": "--help", "version": "--version"}  # word that users may take for a command -> the option
EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", re.DOTALL)


def is_usage_error(error: Exception) -> bool:
    """Whether an exception is a usage error of the CLI library."""
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == 2


def usage_problem(error: Exception, arguments: list[str]) -> str:
    """Returns a usage error of the CLI library in autotune's form; for an unknown name, it suggests the nearest valid name."""
    context = getattr(error, "ctx", None)
    command = arguments[:1] if arguments and not arguments[0].startswith("-") else []
    path = getattr(context, "command_path", " ".join(["autotune", *command]))
    of = path.removeprefix("autotune").strip()
    of = f"{of}: " if of else ""
    option = getattr(error, "option_name", None)
    see = f"See `{path} --help`."
    if option and type(error).__name__ == "NoSuchOption":
        if meant := KEYS.get(option):
            return f"{of}no such option, got {option!r:.300}. Give {meant}. {see}"
        return f"{of}no such option, got {option!r:.300}. {one_of(option, _options_of(context))} {see}"
    names = sorted(getattr(getattr(context, "command", None), "commands", {}))
    unknown = next((a for a in arguments if not a.startswith("-")), None)
    if names and (meant := OPTIONS.get(unknown or "")):
        return f"COMMAND: no such command, got {unknown!r:.300}. Did you mean {meant!r}? {see}"
    if names and unknown is not None and unknown not in names:
        return f"COMMAND: no such command, got {unknown!r:.300}. {one_of(unknown, names)} {see}"
    text = str(getattr(error, "format_message", error.__str__)()).strip().rstrip(".")
    if extra := EXTRA.fullmatch(text):
        return f"{of}more words than it takes, got {extra[1]!r:.300}. {see}"
    parameter = getattr(error, "param", None)
    option, value = _given(parameter, arguments)
    if value is not None and (allowed := _numbers(parameter)):
        return f"{option}: {_wrong(parameter, value)}, got {value!r:.300}. Allowed: {allowed}. {see}"
    got = f", got {value!r:.300}" if value is not None else ""
    return f"{of}{text[:1].lower()}{text[1:]}{got}. {see}"


def _given(parameter: Any, arguments: list[str]) -> tuple[str, str | None]:
    """Returns an option as it was typed, and its value; ("", None) if it was not typed."""
    for name in getattr(parameter, "opts", []):
        for at, word in enumerate(arguments):
            if word == name and at + 1 < len(arguments):
                return name, arguments[at + 1]
            if word.startswith(f"{name}="):
                return name, word.partition("=")[2]
    return "", None


def _numbers(parameter: Any) -> str:
    """Returns the numbers that an option takes: "whole numbers from 0", "numbers from 0.1", "whole numbers from 1 to 100"."""
    kind = _kind(parameter)
    if kind is None:
        return ""
    low, high = parameter.min, parameter.max
    between = f" from {low:g}" if low is not None else ""
    return f"{'whole ' * (kind is int)}numbers{between}{f' to {high:g}' if high is not None else ''}"


def _kind(parameter: Any) -> type[int] | type[float] | None:
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    return kind if kind in (int, float) else None


def _wrong(parameter: Any, value: str) -> str:
    kind = _kind(parameter) or float
    try:
        kind(value)
    except ValueError:
        return "not a whole number" if kind is int else "not a number"
    return "out of range"


def _options_of(context: Any) -> list[str]:
    parameters = context.command.get_params(context) if context is not None else []
    return [name for p in parameters for name in getattr(p, "opts", []) if name.startswith("--")]
