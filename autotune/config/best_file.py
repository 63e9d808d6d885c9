"""Reads a best.yaml for a real run: its knobs, the loaders that they belong to, and its origin. Executes nothing in the file.

This module also runs in the user's own process (`autotune.apply`), whose environment may lack all of autotune's dependencies
except PyYAML. So this module must not import OmegaConf, psutil or NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.config import yaml_file
from autotune.config.literals import PLACEHOLDER, filled, is_reference, plain
from autotune.config.provenance import EXPORTED, PROVENANCE, Provenance
from autotune.errors import BadInput, one_of
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import CATALOGUE, clash_words, clashes, is_knob, knob
from autotune.knobs.environment import PREFIX
from autotune.knobs.values import shown, value_of
from autotune.masking import MASK, is_masked, is_secret
from autotune.plain_text import one_line
from autotune.records import Knobs, KnobValue

MAX_WORDS = 200  # maximum number of characters that a message quotes from a file
# A file made elsewhere may ask for more workers than this machine has cores. Such values are reported, not rejected.
# Only values that no machine could use are rejected.
ANYWHERE = HostContext(num_cores=2**20)


@dataclass(frozen=True, kw_only=True)
class Best:
    """What a best.yaml sets, and where it comes from.

    Attributes:
        file: path as the user gave it.
        knobs: knob key -> value, including the pins.
        target: loaders whose knobs were set in the study, as in `Spec.target`; None if unknown.
        identity: facts about the study's machine and program, name -> value; {} if unknown.
        command: the study's argument list with unfilled placeholders; [] for a recipe or if unknown.
        is_recipe: whether the file names a built-in recipe to train.
        origin: study, ratio and day, each "" if unknown.
    """

    file: str
    knobs: Knobs
    target: list[dict[str, Any]] | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    is_recipe: bool = False
    origin: tuple[str, str, str] = ("", "", "")

    @property
    def shown_knobs(self) -> Knobs:
        """The knobs with secrets masked, for display."""
        return {key: MASK if _is_secret(key, value) else value for key, value in self.knobs.items()}

    @property
    def open_knobs(self) -> Knobs:
        """The knobs that are not secret."""
        return {key: value for key, value in self.knobs.items() if not _is_secret(key, value)}

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that the knobs set."""
        return {name: text for key, value in self.knobs.items() for name, text in knob(key).environment(value).items()}

    def handed_over(self, words: Sequence[str], *, known: Collection[str] = ()) -> tuple[Knobs, list[str]]:
        """Returns the knobs that a command sets through literal arguments, and what is wrong with the command.

        The study may have passed knobs as arguments (`--batch-size {loader.batch_size=64}`). If its best batch size is 128, a
        command without `--batch-size 128` would train with another value.

        Args:
            words: the command to check, or the arguments of this process.
            known: knobs for which the command has placeholders.
        """
        passed: Knobs = {}
        problems = []
        for at, part in enumerate(self.command):
            keys = [match[1] for match in PLACEHOLDER.finditer(part) if match[1] in self.knobs and match[1] not in known]
            if not keys:
                continue
            option = [] if PLACEHOLDER.sub("", part) or not at else [self.command[at - 1]]
            older = {key: str(value) for key, value in self.knobs.items()}  # until 2026-12-01, True was always spelled "True"
            # The word before may be a placeholder, too.
            if any(_holds(words, [filled(word, knobs) for word in (*option, part)]) for knobs in (self.knobs, older)):
                passed.update({key: self.knobs[key] for key in keys})
                continue
            asked = one_line(" ".join([*option, part]), MAX_WORDS)
            problems.append(
                f"COMMAND: does not set {', '.join(keys)} as it did when {self.file} was made. Use `{asked}` in the command."
            )
        return passed, problems


def read_best(path: Path) -> Best:
    """Returns the content of a best.yaml.

    Raises:
        BadInput: the file cannot be read, or has unknown keys, unusable values or no knobs; lists every problem.
    """
    document = yaml_file.read(path, "BEST", EXPORTED)
    if document is not None and not isinstance(document, dict):
        raise BadInput(f"BEST: not a mapping of keys to values, got {shown(document)} in {shown(str(path))}. {EXPORTED}.")
    document = {**(document or {})}
    raw_said = document.pop(PROVENANCE, None)
    said = Provenance.of(raw_said)
    knobs: Knobs = {}
    problems = []
    if len(document) > 1 and not any(is_knob(key) for key, _ in _flat(document)):
        keys = ", ".join(list(document)[:3])
        raise BadInput(f"BEST: not a best.yaml, got {shown(str(path))}, whose keys are not knobs ({keys}, ...). {EXPORTED}.")
    for key, raw in _flat(document):
        try:
            if raw is not None:
                knobs[key] = _value(key, raw)
        except BadInput as error:
            problems += [f"{problem} See {path}." for problem in error.problems]
    if not raw_said and not knobs and not problems:
        problems.append(f"BEST: nothing to apply, got {shown(str(path))} without any knob. {EXPORTED}.")
    problems += [f"{clash_words(*pair)} Both are in {path}." for pair in clashes(knobs)]
    problems += _missing_secrets(said.secret, knobs, path)
    if problems:
        if said.is_newer:
            problems.append(f"BEST: made by a newer version of autotune, got {shown(said.version)} in {path}. Update autotune.")
        raise BadInput(problems)
    doubt = ", ambiguous" if said.verdict == "ambiguous" else ""
    return Best(
        file=str(path),
        knobs=knobs,
        target=said.target,
        identity=said.identity,
        command=said.command,
        is_recipe=said.is_recipe,
        origin=(said.study, f"{said.ratio:.2f}x{doubt}" if said.ratio is not None and knobs else "", said.date),
    )


def _value(key: str, raw: Any) -> KnobValue:
    if not is_knob(key):
        allowed = one_of(key, [*CATALOGUE, "env.NAME"], show=6)
        raise BadInput(f"{key}: not a knob, got {shown(raw)}. {allowed} Remove it: a real run takes only knobs.")
    text = plain(raw) if isinstance(raw, str) else raw
    if text == raw and is_reference(raw):
        raise BadInput(f"{key}: a reference, got {shown(raw)}. Replace it with the value itself.")
    if is_masked(raw):
        raise BadInput(
            f"{key}: a secret that is masked in the file, got {shown(raw)}. Remove it from a copy of the file. {_set_here(key)}"
        )
    value, kind = value_of(knob(key), text, ANYWHERE), knob(key).type
    # `autotune run` reads a file's values through OmegaConf, which is stricter.
    if kind is int and isinstance(text, float):
        raise BadInput(f"{key}: wrong type, got {shown(raw)}. Allowed: a whole number. Write it as {value}.")
    if kind is bool and isinstance(text, str) and text != text.strip():
        raise BadInput(f"{key}: wrong type, got {shown(raw)}. Allowed: true or false. Leave the spaces out.")
    return value


def _missing_secrets(secret: list[str], knobs: Knobs, path: Path) -> list[str]:
    """Returns a problem for each secret of the study that is neither in the file nor in this environment."""
    return [
        f"{key}: a secret whose value is neither in {shown(str(path))} nor in this environment. {_set_here(key)}"
        for key in secret
        if key.startswith(PREFIX) and key not in knobs and key.removeprefix(PREFIX) not in os.environ
    ]


def _set_here(key: str) -> str:
    return f"Set the variable yourself: export {key.removeprefix(PREFIX)}=..."


def _is_secret(key: str, value: KnobValue) -> bool:
    return key.startswith(PREFIX) and is_secret(key.removeprefix(PREFIX), str(value))


def _holds(words: Sequence[str], few: list[str]) -> bool:
    """Returns whether `words` contains the sequence `few`; "--size 8" also matches "--size=8"."""
    spans = [list(words[at : at + len(few)]) for at in range(len(words))]
    return few in spans or (len(few) > 1 and "=".join(few) in words)


def _flat(document: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for group, inside in document.items():
        if isinstance(inside, dict):
            yield from ((f"{group}.{name}", value) for name, value in inside.items())
        else:
            yield str(group), inside
