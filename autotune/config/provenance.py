"""Reads the `provenance` of a best.yaml, for `apply`, `verify` and warm starts. No other module parses it.

Nothing in the file is executed or trusted: missing entries and entries of the wrong type are left out. This module also runs in
the user's own process (`autotune.apply`), so it must not import OmegaConf, psutil or NumPy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from autotune import shapes
from autotune.config.literals import plain
from autotune.plain_json import mapped

PROVENANCE = "provenance"
EXPORTED = "Give a study, or a file that `autotune export STUDY -o best.yaml` wrote"
MAX_NAME = 60
MAX_ROUNDS = 10**6  # largest number of rounds that is believed; a claim with far more rounds could not be stored
MAX_ERROR = 10.0  # largest standard error of a log ratio that is believed; the interval, exp(13 * error), must be finite
NUMBER = re.compile(r"\d{1,9}")
RECIPE_KEYS = {"model.name", "model.factory"}
# Keys that identify a loader whose knobs were set in the study -> their types. Only the first two are in every file.
TARGET_KINDS = {"site": str, "ordinal": int, "code": str, "nth": int, "is_unshared": bool}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A claimed measurement of one configuration.

    Attributes:
        value: rate in samples (or tokens) per second, even if the study's objective was another; None if unknown.
        ci: 95 % interval; None if unknown.
    """

    value: float | None = None
    ci: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a best.yaml comes from; what the file lacks is "", None or empty.

    Attributes:
        study, date: name and day of the study.
        ratio, ci: speed-up of best over baseline in the finals, and its 95 % interval.
        num_rounds, freedom: rounds and degrees of freedom from which the interval was computed.
        error: standard error of the log of the ratio; files of 2026-11-30 or before lack it.
        verdict: the finals' verdict.
        baseline, best: measured rate of each of the two configurations.
        identity: facts about the study's machine and program, name -> value.
        settings: configuration key -> value, for the keys that decide what is measured; includes the recipe if one was tuned.
        command: argument list of the program with unfilled placeholders; [] for a recipe.
        cwd: working directory of the program.
        pinned: keys of the knobs that the user pinned.
        secret: keys of the knobs whose values are secret.
        target: loaders whose knobs were set in the study, as in `Spec.target`.
        version: version of autotune that wrote the file.
    """

    study: str = ""
    date: str = ""
    ratio: float | None = None
    ci: tuple[float, float] | None = None
    num_rounds: int = 0
    freedom: float | None = None
    error: float | None = None
    verdict: str = ""
    baseline: Rate = field(default_factory=Rate)
    best: Rate = field(default_factory=Rate)
    identity: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    cwd: str = ""
    pinned: list[str] = field(default_factory=list)
    secret: list[str] = field(default_factory=list)
    target: list[dict[str, Any]] | None = None
    version: str = ""

    @classmethod
    def of(cls, said: Any) -> Provenance:
        """Returns the provenance from a file's `provenance` entry. The entry can have any type and content."""
        # `export` escapes each `${`: in a recorded command, it is the user's text, not a reference. This undoes the escapes.
        said = mapping(mapped(said, lambda value: plain(value) if isinstance(value, str) else value))
        program, speedup = mapping(said.get("program")), mapping(said.get("speedup"))
        return cls(
            study=str(said.get("study") or "")[:MAX_NAME],
            date=str(said.get("date") or ""),
            ratio=number(speedup.get("ratio")),
            ci=interval(speedup.get("ci")),
            num_rounds=int(min(number(speedup.get("num_rounds")) or 0, MAX_ROUNDS)),
            freedom=found if (found := number(speedup.get("freedom"))) is not None and found >= 1 else None,
            error=found if (found := number(speedup.get("error"))) is not None and 0 <= found <= MAX_ERROR else None,
            verdict=str(speedup.get("verdict") or ""),
            baseline=_rate(said.get("baseline")),
            best=_rate(said.get("best")),
            identity=mapping(said.get("identity")),
            settings=mapping(said.get("settings")),
            command=words(program.get("command")),
            cwd=str(program.get("cwd") or ""),
            pinned=words(said.get("pinned")),
            secret=words(said.get("secret")),
            target=_target(said.get("target")),
            version=str(mapping(said.get("versions")).get("autotune") or "")[:MAX_NAME],
        )

    @property
    def is_newer(self) -> bool:
        """Whether a newer version of autotune wrote the file."""
        own: str = sys.modules[__name__.partition(".")[0]].__version__  # an import would be circular
        theirs, ours = (tuple(map(int, NUMBER.findall(text)[:3])) for text in (self.version, own))
        return theirs > ours

    @property
    def is_recipe(self) -> bool:
        """Whether the file names a built-in recipe to train."""
        return names_recipe(self.settings)


def names_recipe(settings: Iterable[str]) -> bool:
    """Whether keys of settings include those of a built-in recipe."""
    return not RECIPE_KEYS.isdisjoint(settings)


def mapping(said: Any) -> dict[str, Any]:
    """Returns a mapping, with text as keys; {} for anything else."""
    return {str(key): value for key, value in said.items()} if isinstance(said, dict) else {}


def words(said: Any) -> list[str]:
    """Returns the entries of a list as text; [] for anything else."""
    return [str(word) for word in said] if isinstance(said, list) else []


def number(said: Any) -> float | None:
    """Returns a number as a float; None for anything else ("2.5", True, nan) and for numbers too large to compute with."""
    return float(said) if shapes.number(said) else None


def interval(said: Any) -> tuple[float, float] | None:
    """Returns two ascending positive numbers; None for anything else."""
    if not isinstance(said, list | tuple) or len(said) != 2:
        return None
    low, high = number(said[0]), number(said[1])
    return None if low is None or high is None or not 0 < low <= high else (low, high)


def _rate(said: Any) -> Rate:
    return Rate(value=number(mapping(said).get("value")), ci=interval(mapping(said).get("ci")))


def _target(said: Any) -> list[dict[str, Any]] | None:
    """Returns the loaders that a file names; None if there are none, or if any is unusable."""
    entries = [mapping(entry) for entry in said] if isinstance(said, list) else []
    found = [
        {name: entry[name] for name, kind in TARGET_KINDS.items() if isinstance(entry.get(name), kind)} for entry in entries
    ]
    if not found or any({"site", "ordinal"} - entry.keys() or ("code" in entry) != ("nth" in entry) for entry in found):
        return None
    return found
