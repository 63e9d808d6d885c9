"""What a best.yaml claims, and what it takes to measure that again. Nothing in the file is executed."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.config import files
from autotune.config.best_file import EXPORTED, PROVENANCE, RECIPE_KEYS, Provenance, Rate, interval, mapping
from autotune.config.keys import is_setting, literal, plain
from autotune.config.overrides import GLOBAL_BATCH
from autotune.config.recipe import PARTS
from autotune.errors import BadInput
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import is_knob, knob
from autotune.knobs.values import shown, value_of
from autotune.masking import is_masked
from autotune.plain_text import one_line
from autotune.records import Knobs, KnobValue
from autotune.stats import Ratio

MAX_LINE = 2000


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What an exported file says: these changes make this program so much faster.

    Attributes:
        file: the file, as the user named it.
        study: name of the study it comes from, "" unknown.
        changed: knobs that the best configuration changes of the baseline.
        pinned: knobs that the user had fixed, in the baseline too; those that are secret are left out.
        secret: keys of the pinned knobs that are secret.
        speedup: best over baseline; its interval None where there is none, its rounds 0 where they are unknown.
        baseline, best: what the two were measured at.
        identity: what it was measured with, by name: machine and program.
        settings: configuration keys that decide what is measured -> value; holds the recipe when one was tuned.
        command: argument list of the program, placeholders unfilled; [] for a recipe and in files that do not say.
        cwd: its working directory, "" unknown.
    """

    file: str
    study: str = ""
    changed: Knobs
    pinned: Knobs = field(default_factory=dict)
    secret: list[str] = field(default_factory=list)
    speedup: Ratio
    baseline: Rate = field(default_factory=Rate)
    best: Rate = field(default_factory=Rate)
    identity: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    cwd: str = ""

    @property
    def is_recipe(self) -> bool:
        """Whether the file alone says what to train: a built-in recipe."""
        return not RECIPE_KEYS.isdisjoint(self.settings)

    @property
    def parts(self) -> dict[str, str]:
        """Code of the user's that the recipe is made of, key -> reference; no file makes it run."""
        return {key: str(self.settings[key]) for key in PARTS.values() if key in self.settings}

    def check_parts(self, overrides: Sequence[str]) -> None:
        """Checks that the user has named the code that the recipe is made of: nothing is run because a file says so.

        Raises:
            BadInput: some of it is not on the command line.
        """
        named = {word.partition("=")[0] for word in overrides}
        absent = [(key, reference) for key, reference in self.parts.items() if key not in named]
        if absent:
            raise BadInput(
                f"{key}: {self.file} is about code of yours, and nothing is started because a file says so, got nothing. "
                f"If this is what you mean, add {key}={shlex.quote(one_line(reference, MAX_LINE))}."
                for key, reference in absent
            )

    def document(self, *, without: Sequence[str]) -> dict[str, Any]:
        """Returns the file as configuration for both of its configurations: settings and pins, without the changes.

        Args:
            without: groups to leave out: a recipe's where a command is verified, those that the user chose another file of.
        """
        made: dict[str, Any] = {}
        for key, value in {**self.settings, **self.pinned}.items():
            if (key.partition(".")[0] not in without or key == GLOBAL_BATCH) and key not in self.parts:
                *groups, last = key.split(".") if not key.startswith("env.") else key.split(".", 1)
                inner = made
                for group in groups:
                    inner = inner.setdefault(group, {})
                inner[last] = literal(value) if isinstance(value, str) else value
        return made


@dataclass(frozen=True, kw_only=True)
class Verify:
    """What is to be verified, and with how much effort.

    Attributes:
        claim: what the file says.
        rounds: pairs of fresh processes to compare.
        minutes: no further round is begun that would not end within so much wall time; two are always measured.
        long_minutes: length of one long window for each of the two configurations; None for none.
    """

    claim: Claim
    rounds: int
    minutes: float
    long_minutes: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Verify:
        """Returns what `as_json` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            claim = dict(raw["claim"])
            speedup = {**claim["speedup"], "ci": interval(claim["speedup"]["ci"])}
            rates = {name: Rate(value=claim[name]["value"], ci=interval(claim[name]["ci"])) for name in ("baseline", "best")}
            return cls(**{**raw, "claim": Claim(**{**claim, **rates, "speedup": Ratio(**speedup)})})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a claim that this version can read: {error}") from error


def read_claim(path: Path, host_context: HostContext) -> Claim:
    """Returns what an exported file claims.

    Args:
        path: the file.
        host_context: the machine whose bounds hold for its knobs.

    Raises:
        BadInput: not a file of ours: not YAML, unknown keys, unusable values, no claim; names everything that is wrong.
    """
    document = files.read(path, "BEST", host_context).document
    raw_said = document.pop(PROVENANCE, None)
    if not isinstance(raw_said, dict):
        got = "an empty file" if not document else "none"
        raise BadInput(f"provenance: nothing claimed in {shown(str(path))}, got {got}. {EXPORTED}, as it is.")
    said = Provenance.of(raw_said)
    pins, secrets = ([knob(key).key for key in keys if is_knob(key)] for keys in (said.pinned, said.secret))
    values = {key: value for key, value in files.flat(document) if value is not None}
    knobs = {key: _value(key, value, host_context, path) for key, value in values.items() if is_knob(key)}
    others = {key: value for key, value in values.items() if key not in knobs}  # put in by hand
    changed = {key: value for key, value in knobs.items() if key not in pins}
    claim = Claim(
        file=str(path),
        study=said.study,
        changed=changed,
        pinned={key: value for key, value in knobs.items() if key in pins},
        secret=[key for key in pins if key not in knobs],
        speedup=_speedup(said, raw_said, path) if changed else Ratio(ratio=1.0, ci=None, num_rounds=0),
        baseline=said.baseline,
        best=said.best,
        identity=said.identity,
        settings=_settings({**said.settings, **others}, host_context, path),
        command=said.command,
        cwd=said.cwd,
    )
    if lost := [key for key in secrets if key not in knobs and key not in pins]:
        group, name = lost[0].split(".", 1)
        raise BadInput(
            f"{lost[0]}: a secret that {shown(str(path))} changes and does not hold, got nothing. "
            f"Add it to a copy of the file, as {group}: {{{name}: VALUE}}."
        )
    return claim


def typed_command(claim: Claim) -> str:
    """Returns the line that runs the file's program, for the user to type: nothing is run because a file says so."""
    command = shlex.join(claim.command or ["python", "train.py"])
    line = f"autotune verify {shlex.quote(claim.file)} -- {command}"
    if claim.cwd and claim.cwd != os.getcwd():
        line = f"cd {shlex.quote(claim.cwd)} && autotune verify {shlex.quote(os.path.abspath(claim.file))} -- {command}"
    return one_line(line, MAX_LINE)  # a stranger's words, on the user's terminal


def _value(key: str, value: Any, host_context: HostContext, path: Path) -> KnobValue:
    text = plain(value) if isinstance(value, str) else value
    if text == value and files.is_reference(value):
        raise BadInput(f"{key}: a reference, got {shown(value)} in {path}. A claim is about values: write it out.")
    return value_of(knob(key), text, host_context)


def _settings(said: dict[str, Any], host_context: HostContext, path: Path) -> dict[str, Any]:
    problems = [
        f"{key}: nothing that a claim depends on, got {shown(said[key])} in {path}. {EXPORTED}, as it is."
        for key in said
        if not is_setting(key)
    ]
    for key, value in said.items():
        try:
            if not problems and key not in PARTS.values():  # they are compared with what the user types, and never run
                files.check_key(key, value, host_context)
        except BadInput as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    if masked := [key for key, value in said.items() if is_masked(value)]:
        problems.append(f"{masked[0]}: a secret that the file does not hold, got {shown(said[masked[0]])}. Write it out.")
    if problems:
        raise BadInput(problems)
    return said


def _speedup(said: Provenance, raw_said: dict[str, Any], path: Path) -> Ratio:
    if said.ratio is None or said.ratio <= 0:
        found = f"got {shown(mapping(raw_said.get('speedup')).get('ratio'))} in {path}"
        raise BadInput(f"provenance.speedup.ratio: no speed-up to compare with, {found}. {EXPORTED} at the end of a study.")
    return Ratio(ratio=said.ratio, ci=said.ci, num_rounds=said.num_rounds, freedom=said.freedom)
