"""Implements `autotune inspect`: runs a few steps under the harness, prints what was detected and which knobs can change."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from autotune.cli.live import PHASE_WORDS
from autotune.cli.nodes import closed, launcher_of
from autotune.cli.signals import stoppable
from autotune.cli.terminal import can_redraw, console, print_json
from autotune.detected import doubts, findings, missing_processes
from autotune.errors import NothingWorked
from autotune.knobs.base import value_text
from autotune.quantities import bytes_text
from autotune.wording import log_lines

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.config.compose import Composed
    from autotune.harness.protocol import RankResult
    from autotune.launchers.base import Ended, Launch, Launcher

POLL_S = 0.1
ASKED = "not in the search space"


def inspect(overrides: list[str], *, command: list[str] | None, config_dirs: tuple[Path, ...], as_json: bool) -> int:
    """Prints what was detected in a program and which knobs can be changed.

    Raises:
        BadInput: the request is invalid.
        NothingWorked: the program did not reach its first optimizer steps; the message has the reason and the end of its log.
    """
    from autotune.config.compose import compose
    from autotune.config.schema import LOCAL
    from autotune.machine import host_facts

    facts = host_facts()
    composed = compose(overrides, command=command, config_dirs=config_dirs, facts=facts)
    launcher, facts = launcher_of(composed, facts, is_alone=True)
    shared = None if composed.config.launcher == LOCAL else composed.config.runs_dir  # a node does not see this machine's /tmp
    with (
        stoppable("the inspection was stopped, and its processes and temporary files are gone"),
        closed(launcher),
        tempfile.TemporaryDirectory(prefix="autotune-inspect-", dir=shared) as folder,
    ):
        launch = _launch(composed, Path(folder) / "trials" / "0000", facts)
        ended = _run(launch, launcher, Path(folder), is_quiet=as_json)
    result = _result(ended, launch, composed)
    argv = composed.secrets.words(launch.argv)
    rows = _rows(result, composed, facts)
    left, new = (dict(ended.evidence.get(name) or {}) for name in ("files_left", "files_new"))
    if as_json:
        document = composed.secrets.document(dataclasses.asdict(result))
        print_json({"command": argv, "result": document, "knobs": rows, "files_left": left, "files_new": new})
    else:
        _print(result, rows, argv, composed)
        for sizes, what in (
            (left, "written by the program, not removed"),
            (new, "written during the inspection, by this or another program"),
        ):
            if sizes:
                names = ", ".join(f"{name} ({bytes_text(size)})" for name, size in sizes.items())
                console().print(Text(f"\n{what}: {names}", style="quiet"))
    return 0


def _launch(composed: Composed, folder: Path, facts: dict[str, Any]) -> Launch:
    from autotune.trials.launching import launch, meaningful

    pinned = composed.space.pinned
    return launch(
        composed.config,
        composed.command,
        pinned=meaningful(pinned, {**composed.command.placeholders, **pinned}),
        changed={},
        knobs=pinned,
        machine=facts,
        folder=folder,
        study=folder.parent.parent,
        mode="inspect",
    )


def _run(launch: Launch, launcher: Launcher, folder: Path, *, is_quiet: bool) -> Ended:
    """Runs the inspection in a temporary folder. Saves the copies of overwritten files, even after an interruption."""
    running = launcher.start(launch)
    out, said, began_s = console(stderr=True), "", time.monotonic()
    try:
        with out.status("") if can_redraw(out) and not is_quiet else contextlib.nullcontext() as status:
            while (ended := running.poll()) is None:
                progress = running.progress()
                phase = progress.phase if progress else "spawn"
                words = PHASE_WORDS.get(phase, phase)
                if status:
                    status.update(f"inspecting: {words}, {time.monotonic() - began_s:.0f} s")
                elif words != said and not is_quiet:
                    print(f"autotune: inspecting: {words}", file=sys.stderr, flush=True)
                said = words
                time.sleep(POLL_S)
            return ended
    finally:
        running.stop("inspection is over")
        if (ended := running.poll()) is not None:
            _save(dict(ended.evidence.get("files_aside") or {}), folder.parent)


def _save(aside: dict[str, str], place: Path) -> None:
    """Moves copies of overwritten files from the temporary folder to a new folder in `place`, and prints where they are.

    Args:
        aside: overwritten file -> its copy.
        place: a folder on the copies' own file system, so that moving them needs no space.
    """
    if not aside:
        return
    folder = Path(tempfile.mkdtemp(prefix="autotune-kept-", dir=place))
    for path, copy in aside.items():
        saved = shutil.move(copy, folder / Path(copy).name)
        print(f"autotune: overwritten or removed: {path}; its previous content is in {saved}", file=sys.stderr, flush=True)


def _result(ended: Ended, launch: Launch, composed: Composed) -> RankResult:
    from autotune.failures import classify

    first = ended.results[0] if ended.results else None
    if first and first.status != "failed" and first.detected.get("num_steps"):
        return first
    outcome, reason = classify(ended.facts(launch.spec))
    lines = [f"the program could not be inspected, {outcome}: {reason or 'the program took no optimizer step'}"]
    lines += [f"{label}: {text}" for label, text in (findings(first) if first else [])]
    tail = log_lines({name: ended.evidence.get(name) for name in ("log_tail", "stdout_tail")})
    lines += ["The end of its log:", *tail] if tail else []
    raise NothingWorked(composed.secrets.text("\n".join(lines)))


def _rows(result: RankResult, composed: Composed, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row per knob: its value, the values that `run` would try, or why `run` would not change the knob."""
    from autotune.knobs.catalogue import CATALOGUE
    from autotune.machine import host_context
    from autotune.space import resolve

    here = host_context(facts, result, is_recipe=composed.command.is_recipe)
    passed = composed.command.placeholders
    space = resolve(composed.space, here, passed=passed)
    rows = []
    for key in [*CATALOGUE, *(key for key in composed.space.domains if key not in CATALOGUE)]:
        value = result.observed.get(key, passed.get(key))
        row: dict[str, Any] = {"knob": key, "value": value, "can_be_turned": True, "reason": "", "values": []}
        if key in space.pinned:
            row |= {"can_be_turned": False, "reason": f"pinned at {value_text(space.pinned[key])}"}
        elif key in space.domains:
            row["values"] = list(space.domains[key].values)
            row["reason"] = "through the command's placeholder" if key in passed else ""
        elif key in space.dropped:
            row |= {"can_be_turned": False, "reason": space.dropped[key]}
        elif why_not := CATALOGUE[key].blocked(here) or here.not_applicable.get(key):
            row |= {"can_be_turned": False, "reason": why_not}
        else:
            row["reason"] = ASKED
        rows.append(row)
    return rows


def _print(result: RankResult, rows: list[dict[str, Any]], argv: list[str], composed: Composed) -> None:
    out = console()
    doubtful = filter(None, [missing_processes(result, argv), *doubts(result)])
    lines = [("program", shlex.join(argv)), *findings(result), *(("doubt", text) for text in doubtful)]
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(no_wrap=True, style="quiet")
    found.add_column(overflow="fold")
    for label, text in lines:
        found.add_row(label, Text(composed.secrets.text(text), style="warn" if label == "doubt" else ""))
    out.print(found)
    out.print()
    _print_changeable(out, [row for row in rows if row["can_be_turned"]])
    _print_unchangeable(out, [row for row in rows if not row["can_be_turned"]])


def _print_changeable(out: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("can be changed", "now", "tried"):
        table.add_column(name, no_wrap=name != "tried", style="key" if name == "can be changed" else "", overflow="fold")
    for row in rows:
        tried = ", ".join(map(value_text, row["values"]))
        table.add_row(row["knob"], Text(value_text(row["value"])), Text("; ".join(filter(None, [tried, row["reason"]]))))
    out.print(table if rows else Text("no setting can be changed", style="warn"))
    if any(row["reason"] == ASKED for row in rows):
        out.print(f"\n{ASKED}: [command]autotune knobs NAME[/] shows how to search it.")


def _print_unchangeable(out: Console, rows: list[dict[str, Any]]) -> None:
    reasons: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        reasons.setdefault(row["reason"], []).append(row)
    if not reasons:
        return
    out.print()
    out.print(Text("cannot be changed", style="quiet"))
    for reason, refused in reasons.items():
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=2)
        grid.add_column(overflow="fold")
        grid.add_row("", Text.assemble((", ".join(_names(refused)), "key"), f": {reason}"))
        out.print(grid)


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the names of the knobs in `rows`, with their values if known; a complete family becomes one name, "nccl.*"."""
    from autotune.knobs.catalogue import CATALOGUE

    keys = [row["knob"] for row in rows]
    names = []
    for row in rows:
        family = row["knob"].partition(".")[0]
        inside = [key for key in CATALOGUE if key.startswith(f"{family}.")]
        is_whole = len(inside) > 1 and set(inside) <= set(keys)
        alone = row["knob"] if row["value"] is None else f"{row['knob']} ({value_text(row['value'])})"
        names.append(f"{family}.*" if is_whole else alone)
    return list(dict.fromkeys(names))
