"""Handles the program's command line: placeholders, checks before anything starts, and the study's default name."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.config.cluster import problems_of_export
from autotune.config.keys import no_such
from autotune.config.literals import DOUBLED, PLACEHOLDER, filled
from autotune.config.recipe import script_of, words_of
from autotune.config.schema import StudyConfig
from autotune.config.startable import EXAMPLE, startable
from autotune.config.wrapped_commands import program_of
from autotune.errors import BadInput
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import CATALOGUE, GROUPS, is_knob, knob
from autotune.knobs.parallel import STRATEGY
from autotune.knobs.step import METRICS_SYNC_INTERVAL
from autotune.knobs.values import shown, value_of
from autotune.masking import Secrets
from autotune.plain_text import one_line
from autotune.records import Knobs
from autotune.studies import RESERVED_NAMES

# A placeholder without its group that is a whole word or value: "--batch-size={batch_size}". Other braces, as in
# "runs/{model}_{batch_size}", belong to the program.
SHORT = re.compile(r"(?<![^\s=])\{(\w+)(=[^{}]*)?\}(?!\S)")
# The beginning of text that looks like a placeholder of a knob.
OPENED = re.compile(rf"(?<!\{{)\{{\s*((?:{'|'.join([*GROUPS, 'env'])})\.[\w.]*)")
BATCH_SIZE, RECIPE_BATCH_SIZE = "loader.batch_size", 32  # a knob, and its default in recipes
RECIPE_FLAGS = {BATCH_SIZE: "--batch-size", STRATEGY.key: "--strategy", METRICS_SYNC_INTERVAL.key: "--print-every"}
MAX_TITLE = 300


@dataclass(kw_only=True)
class CommandTemplate:
    """The command that starts the program.

    Attributes:
        parts: argument list with unfilled placeholders.
        placeholders: knob key -> value in the baseline, for the knobs that are set through the command line.
        is_recipe: whether the program is a built-in recipe.
        cwd: working directory.
    """

    parts: list[str]
    placeholders: Knobs = field(default_factory=dict)
    is_recipe: bool = False
    cwd: str = field(default_factory=os.getcwd)

    def argv(self, knobs: Knobs) -> list[str]:
        """Returns the argument list with placeholders filled. Knobs that are not in `knobs` get the baseline's values."""
        values = {**self.placeholders, **{key: value for key, value in knobs.items() if key in self.placeholders}}
        if self.is_recipe:  # placeholders are whole arguments; other braces, such as in data.root, are the user's text
            ours = {f"{{{key}}}": str(value) for key, value in values.items()}
            return [ours.get(part, part) for part in self.parts]
        return [filled(part, values) for part in self.parts]


def user_command(command: Sequence[str], host_context: HostContext) -> CommandTemplate:
    """Returns the template of a command given after `--`.

    Raises:
        BadInput: nothing to run, no such program or script, an srun that does not pass the settings on to its ranks, or unknown
            or malformed placeholders; lists every problem.
    """
    if not command:
        raise BadInput(f"COMMAND: no command after '--'. {EXAMPLE}")
    problems = [*startable(list(command), Path.cwd()), *problems_of_export(command, os.environ)]
    stated: Knobs = {}
    silent: Knobs = {}
    for part in command:
        problems += _read_placeholders(part, stated, silent, host_context)
    if BATCH_SIZE in silent and BATCH_SIZE not in stated:  # the DataLoader's default of 1 is no useful baseline
        asked = f"got '{{{BATCH_SIZE}}}'. Write {{{BATCH_SIZE}={RECIPE_BATCH_SIZE}}}"
        problems.append(f"COMMAND: a placeholder without the baseline's value, {asked}, with your own batch size.")
    if problems:
        raise BadInput(problems)
    return CommandTemplate(parts=list(command), placeholders={**silent, **stated})


def recipe_command(config: StudyConfig, *, has_cuda: bool = False, asked: Collection[str] = ()) -> CommandTemplate:
    """Returns the command of a built-in recipe: an ordinary script that is run by path.

    The harness sets most knobs. Knobs that only the script can set are placeholders.

    Args:
        config: the recipe.
        has_cuda: whether there is a CUDA device.
        asked: knobs to set or tune, in addition to those that the configuration pins.
    """
    placeholders: Knobs = {}
    if config.data.name == "synthetic" and config.data.factory is None:
        placeholders[BATCH_SIZE] = RECIPE_BATCH_SIZE  # there is no DataLoader on which the harness could set it
    if config.launch.nproc > 1:
        placeholders[STRATEGY.key] = STRATEGY.default
    is_on_cuda = has_cuda and config.device.kind != "cpu"  # only then does reading metrics wait for the device
    if is_on_cuda or config.step.metrics_sync_interval is not None or METRICS_SYNC_INTERVAL.key in asked:
        placeholders[METRICS_SYNC_INTERVAL.key] = script_of(config).print_every
    words = [*words_of(config), *(word for key in placeholders for word in (RECIPE_FLAGS[key], f"{{{key}}}"))]
    parts = [config.program.python or sys.executable, *starter(config.launch.nproc), *words]
    return CommandTemplate(parts=parts, placeholders=placeholders, is_recipe=True)


def starter(nproc: int) -> list[str]:
    """Returns the words between the interpreter and a recipe's script: those for torchrun, or [] for a single process.

    torchrun must not restart failed ranks, so that a failed rank ends the trial. A trial with fewer or restarted ranks would
    not measure the same program.
    """
    if nproc == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0", f"--nproc-per-node={nproc}"]


def study_name(template: CommandTemplate, config: StudyConfig) -> str:
    """Returns a study's default name: the name of the model, of the script (without extension) or of the program."""
    if template.is_recipe:
        word = str(config.model.name or config.model.factory)
    else:
        word = program_of(template.parts).name or Path(template.parts[0]).stem
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", word).strip("-_")[:60]
    if plain in RESERVED_NAMES:
        plain += "-py"
    # A study's winner is loaded with `+NAME=best`, so NAME must be a group name of Hydra: no dots, a letter first.
    return plain if re.match(r"[A-Za-z]", plain) else f"study-{plain}".strip("-")


def title(template: CommandTemplate, config: StudyConfig, secrets: Secrets) -> str:
    """Returns a one-line title of what is tuned, without the folder of the interpreter."""
    if template.is_recipe:
        several = f", {config.launch.nproc} processes" if config.launch.nproc > 1 else ""
        return f"{config.model.name or config.model.factory} on {config.data.factory or config.data.name}{several}"
    parts = secrets.words(template.parts)
    return one_line(shlex.join([Path(parts[0]).name, *parts[1:]]), MAX_TITLE)


def _read_placeholders(part: str, stated: Knobs, silent: Knobs, host_context: HostContext) -> list[str]:
    """Adds the placeholders of one argument to `stated` (with baseline value) or `silent` (without); returns what is wrong."""
    problems = []
    for match in PLACEHOLDER.finditer(part):
        try:
            _read_placeholder(match, stated, silent, host_context)
        except BadInput as error:
            problems += error.problems
    rest = DOUBLED.sub("", PLACEHOLDER.sub("", part))
    problems += [
        f"COMMAND: a malformed placeholder, got {shown(part)}. Write {{{found[1]}}}." for found in OPENED.finditer(rest)
    ]
    return problems + [
        f"COMMAND: a placeholder without its group, got {match[0]!r}. Write {{{twin}{match[2] or ''}}}."
        for match in SHORT.finditer(rest)
        for twin in CATALOGUE
        if twin.rpartition(".")[2] == match[1]
    ]


def _read_placeholder(match: re.Match[str], stated: Knobs, silent: Knobs, host_context: HostContext) -> None:
    key, text = match[1], match[2]
    if not is_knob(key):
        literal = f"To pass the text itself, write {{{match[0]}}}."
        raise BadInput(f"{no_such('COMMAND', match[0], CATALOGUE, 'placeholder')} {literal}")
    found = knob(key)
    if text is None:
        if key.startswith("threads."):  # how many threads the library uses by default is unknown before the program runs
            raise BadInput(f"COMMAND: a placeholder without the baseline's value, got {match[0]!r}. Write {{{key}=4}}.")
        silent[key] = found.default
        return
    try:
        value = value_of(found, text, host_context)
    except BadInput as error:
        raise BadInput([f"COMMAND: placeholder {match[0]}: {problem}" for problem in error.problems]) from error
    if stated.setdefault(key, value) != value:
        raise BadInput(f"COMMAND: two baseline values of {key}, got {stated[key]!r} and {value!r}. Give one.")
