"""The program's command line: placeholders, checks before anything is started, a name for the study."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.config.keys import no_such
from autotune.config.locate import program
from autotune.config.schema import StudyConfig
from autotune.errors import BadInput, one_of
from autotune.knobs.base import Circumstances
from autotune.knobs.catalogue import CATALOGUE, GROUPS, is_knob, knob
from autotune.knobs.values import shown, value_of
from autotune.masking import Secrets
from autotune.records import Knobs

# {loader.batch_size} or {loader.batch_size=32}; doubled braces stand for themselves.
PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_]\w*(?:\.\w+)+)(?:=([^{}]*))?\}(?!\})")
DOUBLED = re.compile(r"\{(\{[A-Za-z_]\w*(?:\.\w+)+(?:=[^{}]*)?\})\}")
SHORT = re.compile(r"(?<!\{)\{(\w+)(?:=[^{}]*)?\}(?!\})")
OPENED = re.compile(rf"(?<!\{{)\{{\s*((?:{'|'.join([*GROUPS, 'env'])})\.[\w.]*)")
PYTHON = re.compile(r"python[\d.]*")
TAKE_VALUE = ("-W", "-X", "--check-hash-based-pycs")
BATCH_SIZE, RECIPE_BATCH_SIZE = "loader.batch_size", 32  # the recipe's own default
STARTERS = ("torchrun", "accelerate", "deepspeed")  # run the first .py among their arguments


@dataclass(kw_only=True)
class CommandTemplate:
    """How the program is started.

    Attributes:
        parts: argument list, placeholders unfilled.
        placeholders: knob key -> value in the baseline, of the knobs that travel through the command line.
        is_recipe: whether it is a built-in recipe.
        cwd: working directory.
    """

    parts: list[str]
    placeholders: Knobs = field(default_factory=dict)
    is_recipe: bool = False
    cwd: str = field(default_factory=os.getcwd)

    def argv(self, knobs: Knobs) -> list[str]:
        """Returns the argument list with each placeholder filled from `knobs`, from the baseline's value where it is absent."""
        values = {**self.placeholders, **{key: value for key, value in knobs.items() if key in self.placeholders}}
        if self.is_recipe:  # whole words of ours only: braces in a recipe's data.root are the user's
            ours = {f"{{{key}}}": str(value) for key, value in values.items()}
            return [ours.get(part, part) for part in self.parts]
        filled = [PLACEHOLDER.sub(lambda match: str(values[match[1]]), part) for part in self.parts]
        return [DOUBLED.sub(r"\1", part) for part in filled]


def user_command(command: Sequence[str], circumstances: Circumstances, cwd: str | None = None) -> CommandTemplate:
    """Returns the template of a command given after `--`.

    Raises:
        BadInput: nothing to run, no such program or script, unknown or malformed placeholders; names them all.
    """
    folder = cwd or os.getcwd()
    if not command:
        raise BadInput("COMMAND: nothing after '--'. Give the training command: autotune run -- python train.py.")
    problems = _startable(list(command), Path(folder))
    stated: Knobs = {}
    silent: Knobs = {}
    for part in command:
        problems += _read_placeholders(part, stated, silent, circumstances)
    if BATCH_SIZE in silent and BATCH_SIZE not in stated:  # the library's own, a batch of one, is nobody's baseline
        asked = f"got '{{{BATCH_SIZE}}}'. Write {{{BATCH_SIZE}={RECIPE_BATCH_SIZE}}}"
        problems.append(f"COMMAND: a placeholder that needs the baseline's value, {asked}, with what you train with today.")
    if problems:
        raise BadInput(problems)
    return CommandTemplate(parts=list(command), placeholders={**silent, **stated}, cwd=folder)


def recipe_command(config: StudyConfig) -> CommandTemplate:
    """Returns the command of a built-in recipe: an ordinary script run by path. Loader knobs are turned by the harness."""
    flags = {
        "--model": config.model.name,
        "--num-classes": config.model.num_classes,
        "--image-size": config.model.image_size,
        "--data": config.data.name,
        "--data-root": config.data.root,
        "--epochs": config.train.epochs,
        "--lr": config.train.lr,
        "--optimizer": config.train.optimizer,
        "--samples-per-epoch": config.train.samples_per_epoch,
        "--seed": config.study.seed,
        "--device": config.device.kind,
    }
    placeholders: Knobs = {}
    if config.data.name == "synthetic":  # batches without a DataLoader: the harness has none to turn this knob at
        placeholders = {BATCH_SIZE: RECIPE_BATCH_SIZE}
        flags["--batch-size"] = f"{{{BATCH_SIZE}}}"
    given = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
    parts = [config.program.python or sys.executable, str(program("vision.py")), *given]
    return CommandTemplate(parts=parts, placeholders=placeholders, is_recipe=True)


def study_name(template: CommandTemplate, config: StudyConfig) -> str:
    """Returns the default name of a study: the model's, or the script's without its ending."""
    word = str(config.model.name) if template.is_recipe else _script(template.parts)
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", word).strip("-_")[:60]
    if plain in (*GROUPS, "model", "data", "train"):
        plain += "-py"  # a group of ours: `+train=best` could not be told from the recipe's key
    # Hydra's group names have no dots and begin with a letter: `+<study>=best` is to work with every default name.
    return plain if re.match(r"[A-Za-z]", plain) else f"study-{plain}".strip("-")


def title(template: CommandTemplate, config: StudyConfig, secrets: Secrets) -> str:
    """Returns what is tuned, for people."""
    return f"{config.model.name} on {config.data.name}" if template.is_recipe else shlex.join(secrets.words(template.parts))


def _script(parts: list[str]) -> str:
    scripts = [Path(part).stem for part in parts if part.endswith(".py")]
    if scripts:
        return scripts[0]
    return parts[parts.index("-m") + 1] if "-m" in parts[:-1] else Path(parts[0]).stem


def _startable(command: list[str], cwd: Path) -> list[str]:
    """Returns why the command cannot start, as far as that can be seen without starting it."""
    name = command[0]
    found = cwd / name if "/" in name else Path(shutil.which(name) or "")
    if not name or "\0" in "".join(command):
        return ["COMMAND: an empty name or a NUL character in it. Give the training command: autotune run -- python train.py."]
    if not (found.is_file() and os.access(found, os.X_OK)):
        here = cwd / name
        hint = f"Write `python {name}`." if here.is_file() else "Give a program on PATH, or a path to one."
        return [f"COMMAND: no such program, got {shown(name)}. {hint}"]
    script = _script_argument(command)
    if script is None or (cwd / script).exists():
        return []
    near = sorted(file.name for file in (cwd / script).parent.glob("*.py")) if (cwd / script).parent.is_dir() else []
    hint = one_of(Path(script).name, near, show=4) if near else "Give the path of your training script."
    return [f"COMMAND: no such script, got {shown(script)}; looked for in {str(cwd)!r}. {hint}"]


def _script_argument(command: list[str]) -> str | None:
    """Returns the script that an interpreter or a starter is told to run; None when that cannot be read off."""
    name, arguments = Path(command[0]).name, command[1:]
    if name in STARTERS:
        return next((part for part in arguments if part.endswith(".py") and not part.startswith("-")), None)
    if not PYTHON.fullmatch(name):
        return None
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option in ("-", "-c", "-m") or (
            option.startswith("-") and option[1:2] in ("c", "m") and not option.startswith("--")
        ):
            return None
        if option in TAKE_VALUE and arguments:
            arguments.pop(0)
    return arguments[0] if arguments and "{" not in arguments[0] else None


def _read_placeholders(part: str, stated: Knobs, silent: Knobs, circumstances: Circumstances) -> list[str]:
    """Reads the placeholders of one argument, those with a baseline value and those without; returns what is wrong."""
    problems = []
    for match in PLACEHOLDER.finditer(part):
        try:
            _read_placeholder(match, stated, silent, circumstances)
        except BadInput as error:
            problems += error.problems
    rest = DOUBLED.sub("", PLACEHOLDER.sub("", part))
    problems += [
        f"COMMAND: an unclosed placeholder, got {shown(part)}. Write {{{found[1]}}}." for found in OPENED.finditer(rest)
    ]
    return problems + [
        f"COMMAND: a placeholder without its group, got {match[0]!r}. Write {{{twin}}}."
        for match in SHORT.finditer(rest)
        for twin in CATALOGUE
        if twin.rpartition(".")[2] == match[1]
    ]


def _read_placeholder(match: re.Match[str], stated: Knobs, silent: Knobs, circumstances: Circumstances) -> None:
    key, text = match[1], match[2]
    if not is_knob(key):
        literal = f"Write {{{match[0]}}} for the text itself."
        raise BadInput(f"{no_such('COMMAND', match[0], CATALOGUE, 'placeholder')} {literal}")
    found = knob(key)
    if text is None:
        if key.startswith("threads."):  # the library's own number is not known before the program runs
            raise BadInput(f"COMMAND: a placeholder that needs the baseline's value, got {match[0]!r}. Write {{{key}=4}}.")
        silent[key] = found.default
        return
    try:
        value = value_of(found, text, circumstances)
    except BadInput as error:
        raise BadInput([f"COMMAND: placeholder {match[0]}: {problem}" for problem in error.problems]) from error
    if stated.setdefault(key, value) != value:
        raise BadInput(f"COMMAND: two baseline values of {key}, got {stated[key]!r} and {value!r}. Give one.")
