"""Implements `autotune verify`: checks whether the speed-up that a best.yaml claims holds on this machine now."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.run import carry_out, inputs_of
from autotune.cli.show import check_cwd, chosen
from autotune.cli.terminal import print_json
from autotune.errors import BadInput
from autotune.plain_text import plain
from autotune.run_dir import StudyFolder
from autotune.studies import around, call, create

if TYPE_CHECKING:
    from autotune.config.claim import Claim, Verify
    from autotune.config.compose import Composed
    from autotune.records import StudyRecord
    from autotune.study import StudyInputs

YAML = (".yaml", ".yml")
LONG_MINUTES = 3.0  # length of a long run, unless the user gives another


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user typed: the file or study, KEY=VALUE words, the command after `--`, and how much time to spend."""

    what: str
    overrides: tuple[str, ...]
    command: list[str] | None
    runs: Path
    rounds: int
    minutes: float
    is_long: bool
    long_minutes: float | None


def verify(asked: Asked, *, as_json: bool) -> int:
    """Measures the file's baseline and best in pairs, and prints how much of the claimed speed-up is left.

    Raises:
        BadInput: the file, the command or a key cannot be used.
        NothingWorked: the program does not train with its own settings.
        ClaimBroken: the claim does not hold on this machine now.
        NotMeasured: no round was completed.
        Interrupted, FolderLost: as for `run`.
    """
    from autotune.config.claim import Verify, check_bounds, read_claim
    from autotune.config.schema import LOCAL
    from autotune.machine import host_context, host_facts

    _check(asked)
    facts = host_facts()
    study, file = _source(asked)
    claim = read_claim(file)
    if not claim.changed:
        return _nothing(claim, as_json=as_json)
    claim, composed = (claim, _of_study(study, claim)) if study else _of_file(asked, claim, facts)
    if composed.config.launcher == LOCAL:
        check_bounds(claim, host_context(facts, None, is_recipe=False))
    else:  # a cluster's node may have more cores than this machine
        composed.on_node = _bounded(claim, composed)
    long_minutes = (asked.long_minutes or LONG_MINUTES) if asked.is_long else None
    wanted = Verify(claim=claim, rounds=asked.rounds, minutes=asked.minutes, long_minutes=long_minutes)
    from autotune.study import run_study

    inputs = inputs_to_verify(composed, wanted, facts)  # may fail for lack of a node, so the folder is made afterwards
    folder = create(asked.runs if study else Path(composed.config.runs_dir), composed.name)
    return carry_out(run_study, inputs, folder, as_json=as_json)


def _bounded(claim: Claim, composed: Composed) -> Callable[[dict[str, Any]], Composed]:
    """Returns `composed.on_node`, which now also checks whether the node can serve the values of the file."""
    before = composed.on_node

    def on_node(facts: dict[str, Any]) -> Composed:
        from autotune.config.claim import check_bounds
        from autotune.machine import host_context

        check_bounds(claim, host_context(facts, None, is_recipe=False, is_node=True))
        return before(facts) if before else composed

    return on_node


def inputs_to_verify(composed: Composed, wanted: Verify, facts: dict[str, object]) -> StudyInputs:
    """Returns the inputs of a verification, which searches nothing and is limited by rounds and minutes, not by a budget."""
    from autotune.config.schema import Budget

    composed.config.study.budget = Budget(minutes=None, trials=None)
    composed.space = replace(composed.space, domains={})
    return replace(inputs_of(composed, facts, is_alone=True), verify=wanted)


def inputs_to_resume(study: StudyRecord) -> Callable[[Composed, dict[str, object]], StudyInputs]:
    """Returns the function that makes the inputs for resuming an interrupted verification.

    Raises:
        BadInput: it cannot be resumed.
    """
    from autotune.config.claim import Verify
    from autotune.masking import is_masked

    again = "Verify the file again with `autotune verify`."
    try:
        wanted = Verify.from_json(study.verifies)
    except ValueError as error:
        raise BadInput(f"STUDY: a verification that cannot be resumed, got {study.name!r} ({error}). {again}") from error
    if is_masked(wanted.claim.changed):
        raise BadInput(f"STUDY: its best.yaml sets a secret value, which was not saved, got {study.name!r}. {again}")
    return lambda composed, facts: inputs_to_verify(composed, wanted, facts)


def meant(runs: Path, what: str) -> StudyFolder | Path:
    """Returns what BEST means: the path of a best.yaml, or a study, given by name, by folder or by another file in it.

    Raises:
        BadInput: there is no such study.
    """
    folder = around(Path(what)) if os.path.isfile(what) else None
    is_of_study = folder is not None and (not what.endswith(YAML) or Path(what).samefile(folder.config_file))
    is_file = not is_of_study and (what.endswith(YAML) or os.path.isfile(what))
    return Path(what) if is_file else chosen(runs, what)


def no_command(file: str, typed: str) -> BadInput:
    """Returns the error for a missing command: `file` was made for the user's own program. `typed` is the line to type."""
    return BadInput(
        f"COMMAND: missing, and {file} was made for your own program. autotune does not run a command just because a file "
        f"contains it. If the file's command is the right one, type `{typed}`."
    )


def _source(asked: Asked) -> tuple[StudyFolder | None, Path]:
    """Returns (study, best.yaml). Without a study, the typed command or the file's recipe is run, else the study's program."""
    folder = meant(asked.runs, asked.what)
    if isinstance(folder, Path):
        return None, folder
    if not folder.best_file.is_file():
        raise BadInput(
            f"BEST: the study has no winner to verify, got {folder.name!r}. `autotune show {call(folder)}` shows why."
        )
    if asked.command is not None or asked.overrides:
        return None, folder.best_file
    return folder, folder.best_file


def _of_study(study: StudyFolder, claim: Claim) -> Composed:
    """Returns the configuration of an existing study, composed from the study's records, as in `resume`."""
    from autotune.config.recorded import recorded

    try:
        record = study.read_study()
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{study.study_file}: cannot be read, got: {error}. Give the study's best.yaml instead, and the command after `--`."
        ) from error
    composed = recorded(record, study.config_file, is_alone=True)
    check_cwd(record)
    composed.name = _name(claim, study.name)
    return composed


def _of_file(asked: Asked, claim: Claim, facts: dict[str, Any]) -> tuple[Claim, Composed]:
    """Returns a file's claim, and what to run: the recipe that it names, or the typed command."""
    from autotune.config.claim import typed_command
    from autotune.config.compose import compose
    from autotune.config.overrides import RECIPE_KEYS

    has_command = asked.command is not None
    keys = [word.lstrip("+").partition("=")[0] for word in asked.overrides]
    names_recipe = claim.is_recipe or not {"model", "model.name", "model.factory"}.isdisjoint(keys)
    if not has_command and not names_recipe:
        raise no_command(claim.file, typed_command(claim))
    if not has_command:
        claim.check_parts(asked.overrides)
    composed = compose(
        asked.overrides,
        command=asked.command,
        runs_dir=None if "runs_dir" in keys else str(asked.runs),
        facts=facts,
        document=claim.document(without=RECIPE_KEYS if has_command else keys),
    )
    composed.name = composed.config.study.name or _name(claim, Path(claim.file).stem)
    if twice := sorted(composed.space.pinned.keys() & claim.changed.keys()):
        raise BadInput(
            f"{key}: set by the file that is verified, got it on the command line, too. Remove your value." for key in twice
        )
    return replace(claim, pinned={}), composed  # `composed` has the pinned knobs


def _check(asked: Asked) -> None:
    from autotune.config.domains import parse

    problems = [
        f"{option}: not a length of time, got {value}. Give minutes: {option} 5."
        for option, value in (("--minutes", asked.minutes), ("--long-minutes", asked.long_minutes))
        if value is not None and not math.isfinite(value)
    ]
    if asked.long_minutes is not None and not asked.is_long:
        problems.append(
            f"--long-minutes: has an effect only together with --long, got {asked.long_minutes:g}. Give both, or neither."
        )
    for word in asked.overrides:
        key = word.partition("=")[0].lstrip("+")
        if key.startswith("study.budget."):
            problems.append(f"{key}: has no effect on `verify`, got {word!r}. Give --rounds N or --minutes M.")
        elif "=" in word and parse(word).is_sweep_override():
            problems.append(f"{key}: `verify` searches nothing, got {word!r}. Give one value.")
    if problems:
        raise BadInput(problems)


def _name(claim: Claim, otherwise: str) -> str:
    """Returns the name of the verifying study. Names from the file are sanitised, since they become part of a path."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", claim.study or otherwise).strip("-_")[:60]
    return plain if plain.startswith("verify-") else f"verify-{plain or 'best'}"


def _nothing(claim: Claim, *, as_json: bool) -> int:
    reason = "the file changes nothing: there is nothing to verify"
    if as_json:
        print_json({"verification": {"file": claim.file, "verdict": "holds", "reason": reason}})
    else:
        print(plain(f"{claim.file}: {reason}."))
    return 0
