"""Implements `autotune apply`: replaces this process with the program (exec), with the knobs of a best.yaml applied."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from autotune.cli.verify import meant, no_command
from autotune.config.best_file import ANYWHERE, Best, read_best
from autotune.config.literals import PLACEHOLDER
from autotune.errors import BadInput
from autotune.harness import protocol
from autotune.knobs.base import value_text
from autotune.knobs.catalogue import is_knob, knob
from autotune.knobs.memory import MALLOC
from autotune.knobs.values import shown
from autotune.launchers.entry_point import prepare
from autotune.launchers.injection import ISOLATED, PYTHON, REPLACED, REPLACES, isolating, with_harness
from autotune.launchers.real_run import announce, missing, spec_text, variables
from autotune.masking import MASK, Secrets, is_secret
from autotune.plain_text import plain
from autotune.records import Knobs
from autotune.studies import call

if TYPE_CHECKING:
    from autotune.config.claim import Claim
    from autotune.config.command import CommandTemplate
    from autotune.config.compose import Composed

LENGTH = "train.epochs"  # key that decides only how long a recipe trains
# Keys, besides knobs, that affect the training of a recipe: groups of keys (with a dot at the end) and single keys.
USED = ("model.", "data.", "train.", "program.", "device.kind", "device.index", "launch.nproc")
EXAMPLE = "autotune apply best.yaml -- python train.py"
MAX_SCRIPT = 1 << 16  # characters of a shell script that are searched
CLEARING = frozenset(("-i", "-", "--ignore-environment"))  # options of env
ONLY_VARIABLES = "only environment variables may take effect"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user typed: the file or study, KEY=VALUE words for a recipe, the command after `--`, --quiet and --dry-run."""

    what: str
    overrides: tuple[str, ...]
    command: list[str] | None
    runs: Path
    is_quiet: bool = False
    is_dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What to start: the command, the knobs that the command's arguments set, variables for device and threads, and notes."""

    best: Best
    argv: list[str]
    passed: Knobs
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def apply(asked: Asked) -> int:
    """Replaces this process with the program and does not return; with --dry-run, prints what would start and returns 0.

    Raises:
        BadInput: the file or the command cannot be used.
    """
    if protocol.SPEC_VARIABLE in os.environ and not protocol.is_real_run(os.environ):
        got = "got `autotune apply` inside a trial"
        raise BadInput(
            f"COMMAND: a trial gets its settings from its study, {got}. Tune the program: autotune run -- python train.py."
        )
    best = read_best(_file(asked))
    run = _of_recipe(asked, best) if asked.command is None else _of_command(asked.command, asked.overrides, best)
    spec = spec_text(run.best, passed=run.passed, is_quiet=asked.is_quiet)
    argv, added = with_harness(run.argv), {**run.variables, **variables(run.best, spec)}
    if asked.is_dry_run:
        return _print_plan(run, argv, added)
    if not asked.is_quiet:
        announce(run.best, run.notes)
    return _become(argv, {**os.environ, **added})


def _print_plan(run: _Run, argv: list[str], added: dict[str, str]) -> int:
    """Prints the command, the variables added to the environment, and how each setting reaches the program."""
    shown_variables = {name: MASK if is_secret(name, text) else shlex.quote(text) for name, text in added.items()}
    shown_variables[protocol.SPEC_VARIABLE] = "... (the settings, for the program's process)"
    lines = [
        ("command", shlex.join(Secrets.known(words=argv).words(argv))),
        *(("environment", f"{name}={text}") for name, text in shown_variables.items()),
        *(("setting", f"{key}={value_text(value)}  {_way(run, key)}") for key, value in run.best.shown_knobs.items()),
        *(("note", note) for note in (*missing(run.best), *run.notes)),
        ("note", "nothing was started"),
    ]
    print("\n".join(plain(f"{name}  {text}") for name, text in lines))
    return 0


def _way(run: _Run, key: str) -> str:
    """Returns how a setting reaches the program."""
    if key in run.passed:
        return "by an argument of the command"
    if knob(key).environment(run.best.knobs[key]):
        return "by the environment"
    return "not at all" if key == MALLOC.key and missing(run.best) else "in the program's process"


def _file(asked: Asked) -> Path:
    folder = meant(asked.runs, asked.what)
    if isinstance(folder, Path):
        return folder
    if not folder.best_file.is_file():
        raise BadInput(
            f"BEST: the study has no winner to apply, got {folder.name!r}. `autotune show {call(folder)}` shows why."
        )
    return folder.best_file


def _of_command(command: list[str], overrides: tuple[str, ...], best: Best) -> _Run:
    from autotune.config.command import user_command

    if overrides:
        key, got = overrides[0].lstrip("+").partition("=")[0], f"got {shown(overrides[0])} with a command"
        raise BadInput(f"{key}: can only be set for a recipe, {got}. Arguments of the program go after `--`.")
    if not command:
        raise BadInput(f"COMMAND: nothing after '--', got no command. Give the training command: {EXAMPLE}.")
    stated = [PLACEHOLDER.sub(lambda match: _stated(match, best.knobs), word) for word in command]
    template = user_command(stated, ANYWHERE)
    argv = template.argv(best.knobs)
    by_hand, problems = best.handed_over(argv, known=template.placeholders)
    if problems:
        raise BadInput(problems)
    passed = {**by_hand, **_set_by_placeholders(template, best.knobs)}
    return _Run(best=best, argv=argv, passed=passed, notes=[*_of_another_program(best, argv), *_shutting_out(argv)])


def _of_another_program(best: Best, argv: list[str]) -> list[str]:
    """Returns a warning if the file was made for another program; [] otherwise."""
    from autotune.config.wrapped_commands import Program, program_of

    was, now = (program_of(command) if command else Program() for command in (best.command, argv))
    if best.is_recipe or (was.name and now.name and was.name != now.name):
        made_for = "a recipe" if best.is_recipe else f"another program ({was.file_name})"
        here = now.file_name or argv[0]
        return [f"{best.file} was made for {made_for}: settings that do not exist in {here} are not applied"]
    return []


def _shutting_out(argv: list[str]) -> list[str]:
    """Returns a warning if the command seems to keep the settings out of the program; [] otherwise.

    This cannot be checked later, because the program replaces this process.
    """
    from autotune.config.wrapped_commands import ELSEWHERE, program_of, spread_by

    if (how := spread_by(argv)) and not any(protocol.SPEC_VARIABLE in word for word in argv):
        name = how.split()[0]
        return [
            f"processes that {how} starts on other machines run without the settings, unless {name} passes on the environment "
            f"({protocol.SPEC_VARIABLE} and PYTHONPATH). Start them with srun, let {name} start `autotune apply`, or call "
            "autotune.apply() in the program"
        ]
    if (name := Path(argv[0]).name) in ELSEWHERE:
        return [f"{name} runs the program where autotune cannot set anything: run `autotune apply` inside {name}"]
    if name == "env" and CLEARING & {*argv[1:2]}:
        return [f"no setting can take effect: env {argv[1]} removes them from the environment. Leave {argv[1]} out"]
    python = next((at for at, word in enumerate(argv) if PYTHON.fullmatch(Path(word).name)), len(argv))
    if option := isolating(argv[python + 1 :]):
        return [f"{ONLY_VARIABLES}: {ISOLATED.format(option)}"]
    code, script = [word for word in argv if " " in word], program_of(argv).script or ""
    if not script.endswith(".py") and os.path.isfile(script):  # not the pipe of `bash <(...)`, which can be read only once
        with contextlib.suppress(OSError, ValueError), open(script, encoding="utf-8") as file:
            code.append(file.read(MAX_SCRIPT))
    if any(REPLACES.search(line) for text in code for line in text.splitlines()):
        return [f"{ONLY_VARIABLES}: {REPLACED}"]
    return []


def _of_recipe(asked: Asked, best: Best) -> _Run:
    from autotune.config.claim import read_claim
    from autotune.config.command import recipe_command
    from autotune.config.compose import compose
    from autotune.machine import host_facts
    from autotune.trials.settings import process_environment

    if not best.is_recipe:
        typed = f"autotune apply {shlex.quote(best.file)} -- {shlex.join(best.command) or 'python train.py'}"
        raise no_command(best.file, typed)
    _check(asked.overrides)
    keys = [word.partition("=")[0].lstrip("+") for word in asked.overrides]
    if twice := [key for key in keys if key in best.knobs]:
        raise BadInput(f"{key}: set by {best.file}, got it on the command line too. Remove your value." for key in twice)
    facts = host_facts()
    claim = read_claim(Path(best.file))
    claim.check_parts(asked.overrides)
    anywhere = {**facts, "num_cores": ANYWHERE.num_cores}  # the file's values may exceed this machine's number of cores
    composed = compose(asked.overrides, command=None, facts=anywhere, document=claim.document(without=keys))
    knobs = {**composed.space.pinned, **best.knobs}
    epochs = composed.config.train.epochs or 1  # unlike a trial, a real run needs an end
    composed.config.train.epochs = epochs
    template = recipe_command(composed.config, asked=knobs)
    argv = template.argv(knobs)
    notes = _of_other_settings(best, _other_than_measured(asked.overrides, claim, composed))
    length = "1 epoch; train.epochs=N trains longer" if epochs == 1 else f"{epochs} epochs"
    return _Run(
        best=replace(best, knobs=knobs, origin=(best.origin[0], "" if notes else best.origin[1], best.origin[2])),
        argv=argv,
        notes=[*notes, f"starts the training of {composed.title} ({length}): {shlex.join(argv)}"],
        passed=_set_by_placeholders(template, knobs),
        variables=process_environment(composed.config, facts),
    )


def _check(overrides: Sequence[str]) -> None:
    """Checks that each override has an effect on the training of a recipe; `compose` finds the other problems.

    Raises:
        BadInput: a key that only studies use, or several values.
    """
    from autotune.config.domains import parse
    from autotune.config.keys import LEAVES

    problems = []
    for word in overrides:
        key = word.partition("=")[0].lstrip("+")
        if key in LEAVES and not is_knob(key) and not key.startswith(USED):
            problems.append(
                f"{key}: has no effect on `apply`, which trains once, on this machine, got {shown(word)}. Leave it out."
            )
        elif "=" in word and parse(word).is_sweep_override():
            problems.append(f"{key}: `apply` searches nothing, got {shown(word)}. Give one value.")
    if problems:
        raise BadInput(problems)


def _other_than_measured(overrides: Sequence[str], claim: Claim, composed: Composed) -> list[str]:
    """Returns the overrides that make the training differ from the measured one. Another length is no difference."""
    from autotune.config.keys import settings

    now, then = {**settings(composed.config), **composed.space.pinned}, {**claim.settings, **claim.pinned}
    differing = [key for key in {*now, *then} if key != LENGTH and now.get(key) != then.get(key)]
    keys = {word: word.lstrip("+").partition("=")[0] for word in overrides}  # model=NAME chooses all keys of its group
    return [word for word, key in keys.items() if any(other == key or other.startswith(f"{key}.") for other in differing)]


def _of_other_settings(best: Best, overrides: Sequence[str]) -> list[str]:
    """Returns a warning that the file's ratio may not hold with these overrides; [] if overrides or ratio are missing."""
    ratio = best.origin[1]
    if not overrides or not ratio:
        return []
    words = " ".join(map(shlex.quote, overrides))
    check = f"`autotune verify {shlex.quote(best.file)} {words}` measures it"
    return [f"{ratio} may not hold for this run, because it was measured without {words}; {check}"]


def _stated(placeholder: re.Match[str], knobs: Knobs) -> str:
    """Returns a placeholder, with the value from best.yaml if it has none: "{threads.intra}" -> "{threads.intra=4}"."""
    key, value = placeholder[1], placeholder[2]
    return f"{{{key}={knobs[key]}}}" if value is None and key in knobs else placeholder[0]


def _set_by_placeholders(template: CommandTemplate, knobs: Knobs) -> Knobs:
    return {key: knobs[key] for key in template.placeholders if key in knobs}


def _become(argv: list[str], environment: dict[str, str]) -> NoReturn:
    """Replaces this process. From then on, exit status, signals, terminal and children are the program's own."""
    prepare()  # the same limits and signals as in a trial
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    try:
        os.execvpe(argv[0], argv, environment)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"COMMAND: cannot be started, got {shown(argv[0])} ({why}). Give a program: {EXAMPLE}.") from error
