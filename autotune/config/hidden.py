"""Knob values that are secret: a study works with stand-ins for them, and only the program's process gets the values.

`env.HF_TOKEN=choice(a,b)` is searched as `***1` and `***2`: nothing that is written, shown or tracked ever holds a or b, and
nothing has to be masked afterwards. They are not kept anywhere: who resumes such a study gives them again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.config.command import CommandTemplate
from autotune.config.schema import StudyConfig
from autotune.harness.protocol import HIDDEN_VARIABLE
from autotune.knobs.environment import PREFIX
from autotune.masking import MASK, is_secret
from autotune.records import Knobs, KnobValue
from autotune.space import Choice, SearchSpace


@dataclass
class HiddenValues:
    """Stand-ins and what they stand for.

    Attributes:
        values: knob key -> stand-in -> value. MASK alone stands for a pinned value, or for the environment's own.
    """

    values: dict[str, dict[str, str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        for by_stand_in in self.values.values():
            yield from by_stand_in.values()

    def hide(self, key: str, value: KnobValue) -> KnobValue:
        """Returns the stand-in for a value of an environment knob when it is secret, else the value itself."""
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
        """Returns the stand-in for a pinned value when it is secret, else the value itself."""
        if not key.startswith(PREFIX) or not isinstance(value, str) or not is_secret(key.removeprefix(PREFIX), value):
            return value
        self.values[key] = {MASK: value}
        return MASK

    def reveal(self, knobs: Knobs) -> Knobs:
        """Returns a configuration with the values themselves, to fill a command line with."""
        return {key: self.values.get(key, {}).get(str(value), value) for key, value in knobs.items()}

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns a trial's variables with the values themselves, and what the harness checks them by.

        Args:
            variables: name -> value or stand-in.
        """
        real = {name: self.values.get(f"{PREFIX}{name}", {}).get(value, value) for name, value in variables.items()}
        digests = {name: digest(real[name]) for name in variables if real[name] != variables[name]}
        return {**real, HIDDEN_VARIABLE: json.dumps(digests)} if digests else real


def digest(value: str) -> str:
    """Returns what stands for a hidden value in the program's environment; it is written to no file."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def hide(config: StudyConfig, space: SearchSpace, command: CommandTemplate) -> HiddenValues:
    """Replaces every secret value of a composed study by its stand-in, in place, and returns what they stand for."""
    hidden = HiddenValues()
    space.pinned.update({key: hidden.pin(key, value) for key, value in space.pinned.items()})
    for key, domain in space.domains.items():
        if isinstance(domain, Choice):
            space.domains[key] = Choice(tuple(hidden.hide(key, value) for value in domain.values))
    command.placeholders.update({key: hidden.hide(key, value) for key, value in command.placeholders.items()})
    config.env.update({name: str(space.pinned.get(f"{PREFIX}{name}", value)) for name, value in config.env.items()})
    return hidden
