"""Replaces secret knob values with stand-ins in a study; only the program's process gets the real values.

`env.HF_TOKEN=choice(a,b)` is searched as `***1` and `***2`. So nothing that is written, shown or tracked ever contains a or b,
and nothing has to be masked afterwards. The values are not stored, so such a study cannot be resumed. A study that only pins
secrets can be resumed once the user has set their variables.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.config.command import CommandTemplate
from autotune.config.schema import StudyConfig
from autotune.errors import BadInput
from autotune.harness.protocol import HIDDEN_VARIABLE
from autotune.knobs.environment import PREFIX
from autotune.masking import MASK, is_masked, is_secret
from autotune.plain_text import shortened
from autotune.records import Knobs, KnobValue
from autotune.space import Choice, SearchSpace

START_NEW_STUDY = "Start a new study; to resume one later, take secrets from the environment: env.NAME='${oc.env:NAME}'."


@dataclass
class HiddenValues:
    """Stand-ins and the secret values that they replace.

    Attributes:
        values: knob key -> stand-in -> value. The stand-in is MASK and a number. For a pinned value, or the value in autotune's
            environment, it is MASK alone.
    """

    values: dict[str, dict[str, str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        for by_stand_in in self.values.values():
            yield from by_stand_in.values()

    def hide(self, key: str, value: KnobValue) -> KnobValue:
        """Returns the stand-in for an environment knob's value if it is secret, else the value itself."""
        name = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX) or not isinstance(value, str) or not is_secret(name, value) or value.startswith(MASK):
            return value
        known = self.values.setdefault(key, {})
        if name in os.environ:
            known.setdefault(MASK, os.environ[name])
        stand_in = next((own for own, hidden in known.items() if hidden == value), f"{MASK}{len(known.keys() - {MASK}) + 1}")
        known[stand_in] = value
        return stand_in

    def pin(self, key: str, value: KnobValue) -> KnobValue:
        """Returns the stand-in for a pinned value if it is secret, else the value itself."""
        if not key.startswith(PREFIX) or not isinstance(value, str) or not is_secret(key.removeprefix(PREFIX), value):
            return value
        self.values[key] = {MASK: value}
        return MASK

    def recover(self, key: str, stand_in: str, configured: str) -> list[str]:
        """Recovers the value behind a stand-in; returns what is wrong, or [] on success.

        Args:
            key: the knob.
            stand_in: the recorded stand-in.
            configured: the variable's value in the configuration: a stand-in, or the secret if the user gave a reference to it.
        """
        name = key.removeprefix(PREFIX)
        value = os.environ.get(name, "") if is_masked(configured) else configured
        if stand_in == MASK and value:
            self.values.setdefault(key, {})[MASK] = value
            return []
        if stand_in == MASK:
            return [f"{key}: a secret, whose value was not recorded. Set the variable {name} to it and resume again."]
        return [f"{key}: tuned over secrets, whose values were not recorded, got {stand_in!r}. {START_NEW_STUDY}"]

    def reveal(self, knobs: Knobs) -> Knobs:
        """Returns a configuration with the real values, for filling in a command line."""
        return {key: self.values.get(key, {}).get(str(value), value) for key, value in knobs.items()}

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns a trial's variables with the real values, plus the digests with which the harness checks secret values."""
        real = {name: self.values.get(f"{PREFIX}{name}", {}).get(value, value) for name, value in variables.items()}
        digests = {name: digest(real[name]) for name in variables if real[name] != variables[name]}
        return {**real, HIDDEN_VARIABLE: json.dumps(digests)} if digests else real


def digest(value: str) -> str:
    """Returns the digest of a hidden value. The digest is passed in the program's environment and never written to a file."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def hide(config: StudyConfig, space: SearchSpace, command: CommandTemplate) -> HiddenValues:
    """Replaces every secret value of a composed study with a stand-in, in place, and returns the hidden values."""
    hidden = HiddenValues()
    space.pinned.update({key: hidden.pin(key, value) for key, value in space.pinned.items()})
    for key, domain in space.domains.items():
        if isinstance(domain, Choice):
            space.domains[key] = Choice(tuple(hidden.hide(key, value) for value in domain.values))
    command.placeholders.update({key: hidden.hide(key, value) for key, value in command.placeholders.items()})
    config.env.update({name: str(space.pinned.get(f"{PREFIX}{name}", value)) for name, value in config.env.items()})
    return hidden


def recovered(config: StudyConfig, space: SearchSpace, command: CommandTemplate) -> HiddenValues:
    """Returns the values behind a recorded study's stand-ins, from its configuration and the environment.

    Args:
        config: the study's configuration with resolved references. Pinned secrets in its `env` become stand-ins, in place.
        space: the study's recorded search space.
        command: the study's recorded command.

    Raises:
        BadInput: a secret cannot be recovered: it was pinned and is not in the environment, or it was tuned or part of the
            command; lists all such secrets.
    """
    hidden, problems = HiddenValues(), []
    if is_masked(command.parts):
        got = shortened(repr(shlex.join(command.parts)), 200)
        problems.append(f"COMMAND: contains a secret, whose value was not recorded, got {got}. {START_NEW_STUDY}")
    for key, stand_in in {**command.placeholders, **space.pinned}.items():
        if is_masked(stand_in):
            problems += hidden.recover(key, str(stand_in), config.env.get(key.removeprefix(PREFIX), MASK))
    for key, domain in space.domains.items():
        for stand_in in domain.values if domain else ():
            if is_masked(stand_in):
                problems += hidden.recover(key, str(stand_in), MASK)
    if problems:
        raise BadInput(dict.fromkeys(problems))
    config.env.update({name: str(space.pinned.get(f"{PREFIX}{name}", value)) for name, value in config.env.items()})
    return hidden
