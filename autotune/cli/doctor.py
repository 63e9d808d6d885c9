"""Implements `autotune doctor`: checks this machine without changing it. Each finding is ok, skipped, a warning or an error."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import console, print_json
from autotune.errors import BadInput, NothingWorked, one_of
from autotune.launchers.environment import own_environment
from autotune.machine.checks import (
    Finding,
    Status,
    check_connections,
    check_data,
    check_gpus,
    check_host,
    check_program,
)
from autotune.machine.checks.network import legend, matrix
from autotune.machine.probes import Answer, Probe, interpreters, ours
from autotune.machine.probes.data import problem

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 2  # of the --json document; version 1 used the statuses "fine", "not here", "worth mending", "broken"
DATA_ROOT = "data.root"
# Time limit of each probe, seconds. Without persistence mode the driver takes about a second to initialise a GPU. Importing
# torch takes a few seconds from a local disk and up to a minute from a slow one.
GPUS_S, HOST_S, INTERPRETER_S, DATA_S = 20.0, 10.0, 60.0, 20.0
FOLDER_S = 2.0  # before any probe starts, doctor waits at most this long to see whether the data folder can be read
GROUPS = ("GPU", "connections", "host", "program", "data")
ORDER = (Status.ok, Status.skipped, Status.warning, Status.error)
STYLES = {Status.ok: "good", Status.skipped: "quiet", Status.warning: "warn", Status.error: "bad"}
FOUND_ERRORS = NothingWorked.exit_code  # exit status; 1 is reserved for internal errors


def doctor(
    overrides: Sequence[str], *, data: str | None, python: str | None, as_json: bool, command: Sequence[str] | None = None
) -> int:
    """Prints the findings; returns 3 if one of them is an error, else 0.

    Args:
        overrides: `data.root=DIR` or nothing.
        data: the folder given with --data, another way to give data.root.
        python: the interpreter whose torch is checked; None for the one that runs autotune.
        as_json: print one JSON document instead of text.
        command: the words after `--`; must be None, since no program is started.

    Raises:
        BadInput: the folder or the interpreter does not exist, a key is not data.root, or a command is given.
    """
    if command is not None:
        got = shlex.join(command)
        instead = "Leave the command out; to check its interpreter, give --python PYTHON."
        raise BadInput(f"COMMAND: doctor does not run a program, got {got!r} after --. {instead}")
    begun_s = time.monotonic()
    folder, interpreter = _folder(overrides, data), _interpreter(python)
    with console(stderr=True).status("looking at this machine") as status:
        answers = _ask(interpreter, folder, status.update)
    findings = [printable(finding) for finding in _findings(answers, named=interpreter if python else "")]
    if as_json:
        print_json(_document(findings, answers, time.monotonic() - begun_s))
    else:
        _print(findings, answers["gpus"].facts.get("topology") or {})
    return FOUND_ERRORS if any(finding.status is Status.error for finding in findings) else 0


def _folder(overrides: Sequence[str], data: str | None) -> str | None:
    folders = [data] if data is not None else []
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key != DATA_ROOT or "=" not in text:
            raise BadInput(
                f"{key}: doctor does not use this key, got {text!r}. {one_of(key, [DATA_ROOT])} Give {DATA_ROOT}=DIR."
            )
        folders.append(value)
    if len(folders) > 1:
        raise BadInput(f"{DATA_ROOT}: given more than once, got {', '.join(map(repr, folders))}. Give one.")
    if not folders:
        return None
    if reason := "no such folder" if not folders[0] or "\0" in folders[0] else _problem(folders[0]):
        raise BadInput(f"{DATA_ROOT}: {reason}, got {folders[0]!r}. Give the folder with the training data.")
    return folders[0]


def _problem(folder: str) -> str:
    """Returns why a folder cannot be read; "" if it can be read.

    If the folder's file system hangs, the result is "", too. The probe then reports that it hangs.
    """
    found: list[str] = []
    looking = threading.Thread(target=lambda: found.append(problem(folder)), daemon=True)
    looking.start()
    looking.join(FOLDER_S)
    return found[0] if found else ""


def _interpreter(python: str | None) -> str:
    if python is None:
        return sys.executable
    found = shutil.which(os.path.expanduser(python)) if python and "\0" not in python else None
    if found is None:
        raise BadInput(f"--python: no such interpreter, got {python!r}. Give the one that runs your program: $(which python).")
    return found


def _ask(python: str, folder: str | None, say: Any) -> dict[str, Answer]:
    """Returns each probe's answer. GPUs and host are probed in parallel, then the interpreter, then the data folder."""
    own = own_environment()
    with contextlib.ExitStack() as stack:

        def start(argv: list[str], limit_s: float, environment: Mapping[str, str] = own) -> Probe:
            return stack.enter_context(Probe(argv, limit_s=limit_s, env=environment))

        asked = {"gpus": start(ours("gpus"), GPUS_S), "host": start(ours("host"), HOST_S)}
        answers = {name: probe.answer() for name, probe in asked.items()}
        has_gpus = bool(answers["gpus"].facts.get("gpus"))
        if has_gpus:
            say("importing torch")
        # Not `own`: its PYTHONPATH contains autotune's folder, where a torch other than the interpreter's may be installed.
        probe = start(interpreters(python, with_import=has_gpus), INTERPRETER_S, os.environ)
        answers["interpreter"] = probe.answer()
        answers["data"] = Answer()
        if folder is not None:
            say(Text(f"reading {folder}"))
            answers["data"] = start(ours("data", folder), DATA_S).answer()
    return answers


def printable(finding: Finding) -> Finding:
    """Returns a finding without control characters, which folder names may contain."""
    found, cost, command = (_plain(text) for text in (finding.found, finding.cost, finding.command))
    return dataclasses.replace(finding, found=found, cost=cost, command=command)


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _findings(answers: dict[str, Answer], *, named: str) -> list[Finding]:
    gpus, host, interpreter, data = (answers[name] for name in ("gpus", "host", "interpreter", "data"))
    return [
        *check_gpus(gpus.facts, gpus.problem),
        *check_connections(gpus.facts, host.facts),
        *check_host(host.facts, host.problem),
        *check_program(interpreter.facts, interpreter.problem, gpus=gpus.facts, host=host.facts, named=named),
        *check_data(data.facts, data.problem, host=host.facts),
    ]


def _document(findings: list[Finding], answers: dict[str, Answer], seconds: float) -> dict[str, Any]:
    """Returns the --json document: worst status, count per status, findings, GPU topology and probe durations."""
    return {
        "schema": SCHEMA,
        "status": _worst(findings).value,
        "counts": {status.value: sum(finding.status is status for finding in findings) for status in ORDER},
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "topology": (answers["gpus"].facts.get("topology") or {}).get("links") or [],
        "seconds": {**{name: round(answer.seconds, 3) for name, answer in answers.items()}, "total": round(seconds, 3)},
    }


def _worst(findings: list[Finding]) -> Status:
    """Returns the worst status; skipped checks do not count."""
    return max((f.status for f in findings if f.status is not Status.skipped), key=ORDER.index, default=Status.ok)


def _print(findings: list[Finding], topology: dict[str, Any]) -> None:
    out = console()
    if not out.is_terminal:
        _print_plain(findings, topology)
        return
    out.print(_grid(findings))
    links = topology.get("links") or []
    if len(links) > 1:
        out.print()
        _print_matrix(out, links)
    out.print()
    out.print(_headline(findings))


def _grid(findings: list[Finding]) -> Table:
    """Returns the findings by group: rows for each error or warning, one for all ok checks, one for all skipped checks."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="name")
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for group in GROUPS:
        members = [finding for finding in findings if finding.group == group]
        label = group
        for status in (Status.error, Status.warning):
            for finding in (f for f in members if f.status is status):
                text = Text.assemble((finding.name, "key"), f"  {finding.found}")
                grid.add_row(label, Text(status.value, style=STYLES[status]), text)
                for head, words in (("cost", finding.cost), ("fix", finding.command)):
                    if words:
                        grid.add_row(
                            "", "", Text.assemble((f"{head:4} ", "quiet"), (words, "command" if head == "fix" else ""))
                        )
                label = ""
        for status in (Status.ok, Status.skipped):
            if quiet := [f for f in members if f.status is status]:
                joined = Text(" · ").join(Text.assemble((f"{finding.name} ", "quiet"), finding.found) for finding in quiet)
                grid.add_row(label, Text(status.value, style=STYLES[status]), joined)
                label = ""
    return grid


def _headline(findings: list[Finding]) -> Text:
    counts = {status: sum(finding.status is status for finding in findings) for status in ORDER}
    if not counts[Status.error] and not counts[Status.warning]:
        return Text("This machine is fine for training.", style="good")
    parts = [
        f"{counts[each]} {each.value}{'s' * (counts[each] > 1)}" for each in (Status.error, Status.warning) if counts[each]
    ]
    style = STYLES[_worst(findings)]
    return Text.assemble((", ".join(parts), style), ". Nothing was changed: run the commands yourself.")


def _print_matrix(out: Console, links: list[list[str]]) -> None:
    table = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    head, *rows = matrix(links)
    for name in head:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.print(Text(legend(links), style="quiet"))


def _print_plain(findings: list[Finding], topology: dict[str, Any]) -> None:
    """Prints one line per finding, for logs."""
    for finding in findings:
        line = f"{finding.status.value}  {finding.group}  {finding.name}: {finding.found}"
        line += f"  cost: {finding.cost}" if finding.cost else ""
        print(line + (f"  fix: {finding.command}" if finding.command else ""))
    links = topology.get("links") or []
    if len(links) > 1:
        for row in matrix(links):
            print("topology  " + "  ".join(f"{cell:5}" for cell in row).rstrip())
        print(f"topology  {legend(links)}")
    print(_headline(findings).plain)
