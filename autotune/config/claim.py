"""Reads what a best.yaml claims, and how to measure it again. Nothing in the file is executed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.config import files
from autotune.config.best_file import ANYWHERE
from autotune.config.conflicts import problems_of_secrets
from autotune.config.keys import is_setting
from autotune.config.literals import is_reference, literal, plain
from autotune.config.overrides import GLOBAL_BATCH
from autotune.config.provenance import EXPORTED, PROVENANCE, Provenance, Rate, mapping, names_recipe
from autotune.config.recipe import PARTS
from autotune.errors import BadInput
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import is_knob, knob
from autotune.knobs.environment import PREFIX
from autotune.knobs.values import shown, value_of
from autotune.masking import is_masked
from autotune.plain_json import from_json
from autotune.plain_text import one_line
from autotune.records import Knobs, KnobValue
from autotune.stats import Ratio

MAX_LINE = 2000  # maximum number of characters of a line that quotes the file


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim of an exported file: these changes speed up this program by this factor.

    Some fields repeat those of `Provenance`. A field of type `Provenance` cannot replace them: study.json of a verification
    contains a `Claim`, and autotune must still read the study.json of earlier versions.

    Attributes:
        file: path of the file, as the user gave it.
        study: name of the study that the file comes from; "" if unknown.
        changed: knobs in which the best configuration differs from the baseline.
        pinned: knobs that the user pinned. Baseline and best both have them.
        speedup: ratio of best over baseline. Its interval may be None; its number of rounds is 0 if unknown.
        baseline, best: measured rate of each of the two configurations.
        identity: facts about the study's machine and program, name -> value.
        settings: configuration keys that decide what is measured -> value; includes the recipe if one was tuned.
        command: argument list of the program with unfilled placeholders; [] for a recipe or if unknown.
        cwd: working directory of the program; "" if unknown.
    """

    file: str
    study: str = ""
    changed: Knobs
    pinned: Knobs = field(default_factory=dict)
    speedup: Ratio
    baseline: Rate = field(default_factory=Rate)
    best: Rate = field(default_factory=Rate)
    identity: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    cwd: str = ""

    @property
    def is_recipe(self) -> bool:
        """Whether the file names a built-in recipe to train."""
        return names_recipe(self.settings)

    @property
    def parts(self) -> dict[str, str]:
        """Key -> reference to the user's code in the recipe, such as {"train.step": "mine.steps:step"}; see `check_parts`."""
        return {key: str(self.settings[key]) for key in PARTS.values() if key in self.settings}

    def check_parts(self, overrides: Sequence[str]) -> None:
        """Checks that the user has named all code of `parts`: a file alone never runs code.

        Raises:
            BadInput: the command line does not name all of this code.
        """
        named = {word.lstrip("+").partition("=")[0] for word in overrides}
        absent = [(key, reference) for key, reference in self.parts.items() if key not in named]
        if absent:
            raise BadInput(
                f"{key}: {self.file} was made with your own code, which is not run just because a file names it. "
                f"If it is the right code, add {key}={shlex.quote(one_line(reference, MAX_LINE))}."
                for key, reference in absent
            )

    def document(self, *, without: Sequence[str]) -> dict[str, Any]:
        """Returns the configuration that baseline and best share: settings and pins, without the changes.

        Args:
            without: configuration groups to omit; train.global_batch always stays. If a command is verified, these are the
                groups of the recipe. Otherwise they are the groups for which the command line chooses a file: `model` if it
                has model=NAME.
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
    """A claim to verify, and how much effort to spend.

    Attributes:
        claim: the claim of the file.
        rounds: pairs of fresh processes to compare.
        minutes: limit of the wall time, including the first measurement of each configuration, without the long windows. A
            round starts only if it is expected to end in time. The first two rounds always run.
        long_minutes: length of one long window for each of the two configurations; None for no long window.
    """

    claim: Claim
    rounds: int
    minutes: float
    long_minutes: float | None = None

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Verify:
        """Returns the `Verify` that `dataclasses.asdict` turned into plain values.

        Raises:
            ValueError: the values are not those of a `Verify`.
        """
        try:
            return from_json(raw, cls)
        except TypeError as error:
            raise ValueError(f"not a claim that this version can read: {error}") from error


def read_claim(path: Path) -> Claim:
    """Returns the claim of an exported file. `check_bounds` checks whether a machine can serve its values.

    Raises:
        BadInput: not a file that autotune exported (not YAML, unknown keys, unusable values, no claim). Names what is wrong.
    """
    document = files.read(path, "BEST", ANYWHERE).document
    raw_said = document.pop(PROVENANCE, None)
    if not isinstance(raw_said, dict):
        got = "an empty file" if not document else "no provenance in it"
        raise BadInput(f"provenance: no claim to verify in {shown(str(path))}, got {got}. {EXPORTED}, unedited.")
    said = Provenance.of(raw_said)
    pins, secrets = ([knob(key).key for key in keys if is_knob(key)] for keys in (said.pinned, said.secret))
    values = {key: value for key, value in files.flat(document) if value is not None}
    knobs = {key: _value(key, value, path) for key, value in values.items() if is_knob(key)}
    others = {key: value for key, value in values.items() if key not in knobs}  # keys that were added by hand
    changed = {key: value for key, value in knobs.items() if key not in pins}
    if problems := problems_of_secrets(knobs.items()):
        raise BadInput(problems)
    claim = Claim(
        file=str(path),
        study=said.study,
        changed=changed,
        pinned={key: value for key, value in knobs.items() if key in pins},
        speedup=_speedup(said, raw_said, path) if changed else Ratio(ratio=1.0, ci=None, num_rounds=0),
        baseline=said.baseline,
        best=said.best,
        identity=said.identity,
        settings=_settings({**said.settings, **others}, path),
        command=said.command,
        cwd=said.cwd,
    )
    if lost := [key for key in secrets if key not in knobs and key not in pins]:
        raise BadInput(f"{lost[0]}: changed by the study, but its value is secret and not in {shown(str(path))}. Tune it anew.")
    if absent := [key for key in pins if key not in knobs and key.removeprefix(PREFIX) not in os.environ]:
        raise BadInput(_without_pin(absent[0], path))
    return claim


def check_bounds(claim: Claim, host_context: HostContext) -> None:
    """Checks that the machine on which a claim is verified can serve the values of its knobs.

    Raises:
        BadInput: the machine cannot serve a value; lists every problem.
    """
    problems = []
    for key, value in {**claim.pinned, **claim.changed}.items():
        try:
            value_of(knob(key), value, host_context)
        except BadInput as error:
            problems += [f"{claim.file}: {problem}" for problem in error.problems]
    if problems:
        raise BadInput(problems)


def _without_pin(key: str, path: Path) -> str:
    if key.startswith(PREFIX):
        return f"{key}: a secret, which the file does not contain. Set the variable {key.removeprefix(PREFIX)}."
    return f"{key}: pinned in the study, but without a value in {shown(str(path))}. {EXPORTED}, unedited."


def typed_command(claim: Claim) -> str:
    """Returns the command line that verifies the file's program, for the user to type. It is never run automatically."""
    command = shlex.join(claim.command or ["python", "train.py"])
    line = f"autotune verify {shlex.quote(claim.file)} -- {command}"
    if claim.cwd and claim.cwd != os.getcwd():
        line = f"cd {shlex.quote(claim.cwd)} && autotune verify {shlex.quote(os.path.abspath(claim.file))} -- {command}"
    return one_line(line, MAX_LINE)  # untrusted text for the user's terminal


def _value(key: str, value: Any, path: Path) -> KnobValue:
    text = plain(value) if isinstance(value, str) else value
    if text == value and is_reference(value):
        raise BadInput(f"{key}: a reference, got {shown(value)} in {path}. Replace it with the value to verify.")
    return value_of(knob(key), text, ANYWHERE)


def _settings(said: dict[str, Any], path: Path) -> dict[str, Any]:
    problems = [
        f"{key}: cannot be part of a claim, got {shown(said[key])} in {path}. {EXPORTED}, unedited."
        for key in said
        if not is_setting(key)
    ]
    for key, value in said.items():
        try:
            if not problems and key not in PARTS.values():  # the user's code is only compared with the command line
                files.check_key(key, value, ANYWHERE)
        except BadInput as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    if masked := [key for key, value in said.items() if is_masked(value)]:
        problems.append(
            f"{masked[0]}: a secret that is masked in the file, got {shown(said[masked[0]])}. Replace it with the value."
        )
    if problems:
        raise BadInput(problems)
    return said


def _speedup(said: Provenance, raw_said: dict[str, Any], path: Path) -> Ratio:
    if said.ratio is None or said.ratio <= 0:
        found = f"got {shown(mapping(raw_said.get('speedup')).get('ratio'))} in {path}"
        raise BadInput(f"provenance.speedup.ratio: no speed-up to compare with, {found}. {EXPORTED} at the end of a study.")
    return Ratio(ratio=said.ratio, ci=said.ci, num_rounds=said.num_rounds, freedom=said.freedom, error=said.error)
