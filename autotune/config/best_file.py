"""What a best.yaml says of itself: the one reader of its `provenance`, for `apply`, `verify` and warm starts.

Nothing in it is executed, and nothing of it is trusted: what is missing or of another kind is left out. Read in the user's own
process, too (`autotune.apply`): no OmegaConf here, no psutil, no NumPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from autotune.config.literals import plain

PROVENANCE = "provenance"
EXPORTED = "Give a file that `autotune export` wrote"
MAX_NAME = 60
RECIPE_KEYS = {"model.name", "model.factory"}
# Of a loader that the study turned knobs at; only the first two are in every file.
TARGET_KINDS = {"site": str, "ordinal": int, "code": str, "nth": int, "is_unshared": bool}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A claimed measurement of one configuration.

    Attributes:
        value: `unit` per second, whatever the objective; None when the file does not say.
        ci: 95 % interval; None without one.
    """

    value: float | None = None
    ci: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a best.yaml comes from; what the file does not say is "", None or empty.

    Attributes:
        study, date: the study it comes from, and its day.
        ratio, ci, num_rounds, freedom, verdict: best over baseline, as the finals said.
        baseline, best: what the two were measured at.
        identity: what it was measured with, by name: machine and program.
        settings: configuration keys that decide what is measured -> value; holds the recipe when one was tuned.
        command: argument list of the program, placeholders unfilled; [] for a recipe.
        cwd: its working directory.
        pinned, secret: keys of the knobs that the user had fixed, and of those that are secret.
        target: loaders that the study turned knobs at, as in `Spec.target`.
    """

    study: str = ""
    date: str = ""
    ratio: float | None = None
    ci: tuple[float, float] | None = None
    num_rounds: int = 0
    freedom: float | None = None
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

    @classmethod
    def of(cls, said: Any) -> Provenance:
        """Returns what a file says under `provenance`, whatever that is."""
        said = mapping(_as_before(said))
        program, speedup = mapping(said.get("program")), mapping(said.get("speedup"))
        return cls(
            study=str(said.get("study") or "")[:MAX_NAME],
            date=str(said.get("date") or ""),
            ratio=number(speedup.get("ratio")),
            ci=interval(speedup.get("ci")),
            num_rounds=int(number(speedup.get("num_rounds")) or 0),
            freedom=number(speedup.get("freedom")),
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
        )

    @property
    def is_recipe(self) -> bool:
        """Whether the file alone says what to train: a built-in recipe."""
        return not RECIPE_KEYS.isdisjoint(self.settings)


def mapping(said: Any) -> dict[str, Any]:
    """Returns a mapping as it is; {} for anything else."""
    return {str(key): value for key, value in said.items()} if isinstance(said, dict) else {}


def words(said: Any) -> list[str]:
    """Returns the entries of a list as text; [] for anything else."""
    return [str(word) for word in said] if isinstance(said, list) else []


def number(said: Any) -> float | None:
    """Returns a finite number; None for anything else."""
    is_number = isinstance(said, int | float) and not isinstance(said, bool)
    return float(said) if is_number and math.isfinite(said) else None


def interval(said: Any) -> tuple[float, float] | None:
    """Returns two positive numbers, ascending; None for anything else."""
    if not isinstance(said, list | tuple) or len(said) != 2:
        return None
    low, high = number(said[0]), number(said[1])
    return None if low is None or high is None or not 0 < low <= high else (low, high)


def _rate(said: Any) -> Rate:
    return Rate(value=number(mapping(said).get("value")), ci=interval(mapping(said).get("ci")))


def _target(said: Any) -> list[dict[str, Any]] | None:
    """Returns the loaders that a file names; None where it names none that can be used."""
    entries = [mapping(entry) for entry in said] if isinstance(said, list) else []
    found = [
        {name: entry[name] for name, kind in TARGET_KINDS.items() if isinstance(entry.get(name), kind)} for entry in entries
    ]
    if not found or any({"site", "ordinal"} - entry.keys() or ("code" in entry) != ("nth" in entry) for entry in found):
        return None
    return found


def _as_before(said: Any) -> Any:
    """Returns values as they were before the file was written: `${` in a command is the user's own."""
    if isinstance(said, dict):
        return {key: _as_before(value) for key, value in said.items()}
    if isinstance(said, list):
        return [_as_before(value) for value in said]
    return plain(said) if isinstance(said, str) else said
