"""Implements `autotune run --dry-run`: prints what would run and how much fits the budget, as far as known in advance."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.run import Asked, check_grid, compose_asked, inputs_of
from autotune.cli.terminal import print_json
from autotune.config.schema import AUTO, LOCAL, OFF, SearchOptions
from autotune.errors import BadInput
from autotune.plain_text import plain
from autotune.quantities import seconds_text
from autotune.wording import changes_phrase, machine_text

if TYPE_CHECKING:
    from autotune.config.compose import Composed


def print_plan(asked: Asked, *, as_json: bool) -> int:
    """Prints the plan without starting or writing anything.

    Args:
        asked: what the user typed.
        as_json: print one JSON document instead of lines.

    Raises:
        BadInput: the request is invalid.
    """
    from autotune.machine import host_facts
    from autotune.study.earlier_studies import check_named, foreseen

    facts = host_facts()
    composed = compose_asked(asked, facts)
    if composed.config.launcher != LOCAL:
        raise BadInput(
            f"launcher: --dry-run plans only local trials, got {composed.config.launcher!r}. Leave out --dry-run or launcher."
        )
    command, space, runs = composed.command, composed.space, Path(composed.config.runs_dir)
    check_named(composed.config.search.warm_start, runs)
    check_grid(composed)
    earlier = foreseen(inputs_of(composed, facts), runs)
    argv = composed.secrets.words(command.argv({**command.placeholders, **space.pinned}))
    searched, left_out = _searched(composed, facts)
    entries = [
        ("study", f"{composed.name}: {composed.title}"),
        ("machine", machine_text(facts)),
        ("baseline", shlex.join(argv)),
        *([("pinned", changes_phrase(space.pinned))] if space.pinned else []),
        ("searching", f"{', '.join(searched) or 'nothing'}; the baseline may rule out some of them"),
        *([("unavailable", ", ".join(left_out))] if left_out else []),
        *_warm_start(composed.config.search, earlier),
        *_budget(composed, earlier),
        ("note", "nothing was started or written; `autotune inspect` runs a few steps and finds out more"),
    ]
    for note in composed.notes:
        print(f"autotune: {note}", file=sys.stderr)
    if as_json:
        print_json({**dict(entries), "searching": searched, "unavailable": left_out, "baseline": argv, "pinned": space.pinned})
    else:
        print("\n".join(plain(f"{name}  {text}") for name, text in entries))
    return 0


def _searched(composed: Composed, facts: dict[str, object]) -> tuple[list[str], list[str]]:
    """Returns (knobs to search, knobs that cannot be changed here), as far as machine and command determine them."""
    from autotune.config.wrapped_commands import program_of
    from autotune.knobs.catalogue import CATALOGUE
    from autotune.machine import host_context

    command, config = composed.command, composed.config
    num: int | None = config.launch.nproc
    if not command.is_recipe:
        program = program_of(command.argv(command.placeholders))
        is_python = program.by == "python" or (program.script or "").endswith(".py")  # a shell script may start several ranks
        num = program.num_processes or (1 if is_python and program.is_certain and not program.starter else None)
    here = host_context(facts, None, is_recipe=command.is_recipe, device=config.device.kind)
    here = replace(here, world_size=num)
    keys = sorted(composed.space.domains)
    out = [key for key in keys if key in CATALOGUE and key not in composed.space.typed and CATALOGUE[key].blocked(here)]
    return [key for key in keys if key not in out], out


def _warm_start(search: SearchOptions, earlier: tuple[str, float] | None) -> list[tuple[str, str]]:
    """Returns the entry for the studies that would warm-start the search; [] if there are none."""
    asked = search.warm_start
    if search.sampler == "grid":
        return []
    if asked in (AUTO, OFF, False):
        if earlier is None or asked != AUTO:
            return []
        condition = "if torch and device turn out to be the same"
        return [("warm start", f"the best configurations of {earlier[0]} are tried first, {condition}")]
    names = ", ".join(asked if isinstance(asked, list) else [asked])
    return [("warm start", f"the best configurations of {names} are tried first")]


def _budget(composed: Composed, earlier: tuple[str, float] | None) -> list[tuple[str, str]]:
    """Returns the entries for the budget, as far as known before the first trial.

    Args:
        composed: the composed configuration.
        earlier: name of a similar earlier study, and its typical seconds per trial; None if there is none.
    """
    from autotune.trials.budget import most_reserved_s

    budget = composed.config.study.budget
    trials = "" if budget.trials is None else f"{budget.trials} trial{'' if budget.trials == 1 else 's'} at most"
    if budget.minutes is None:
        words = f"{trials or 'none: the search continues until no improvement is expected'}; the time depends on the baseline"
        return [("budget", words)]
    total_s = 60 * budget.minutes
    finals_s = most_reserved_s(total_s)
    search = f"at least {seconds_text(total_s - finals_s)} for the search, at most {seconds_text(finals_s)} for the finals"
    return [
        ("budget", f"{seconds_text(total_s)}{f', {trials}' if trials else ''}: {search}"),
        ("plan", _plan(total_s, finals_s, earlier, most=budget.trials)),
    ]


def _plan(total_s: float, finals_s: float, earlier: tuple[str, float] | None, *, most: int | None) -> str:
    if earlier is None:
        return "the number of trials depends on how long the baseline takes: `run` prints it once the baseline is measured"
    name, trial_s = earlier
    num = round(max(0.0, total_s - finals_s - trial_s) / max(trial_s, 1e-9))  # minus one trial's time for the baseline
    num = num if most is None else min(num, most)
    each = f"if each takes {seconds_text(trial_s)}, as in {name}"
    return f"about {num} trial{'' if num == 1 else 's'}, {each}; `run` prints a better estimate after the baseline"
