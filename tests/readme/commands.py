"""Reads the commands in README.md and docs/, so that the tests and .ci/run use no copies of them.

    python tests/readme/commands.py tests          prints the command that installs autotune and runs the tests
    python tests/readme/commands.py runnable [M]   prints the other commands, one per line, with budgets of M minutes if given

The first line of a fence says how its commands are run. "sh" runs unchanged, "sh example" needs something that only the reader
has, and "sh server" runs until it is stopped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
KINDS = ("sh", "sh example", "sh server")
FENCE = re.compile(r"^```(sh\b[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN, VERIFY, EXPLAIN = (re.compile(rf"\bautotune {name}\b") for name in ("run", "verify", "explain"))


@dataclass(frozen=True)
class Command:
    """A command line of a page, and the kind of its fence."""

    kind: str
    line: str


def commands(text: str) -> Iterator[Command]:
    """Yields all commands in order, without comments. A line that ends in a backslash is joined with the next."""
    for kind, body in FENCE.findall(text):
        for line in body.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+#.*$", "", line).strip()
            if command and not command.startswith("#"):
                yield Command(kind.strip(), command)


def command_for_tests(text: str) -> str:
    """Returns the command that installs and runs the tests."""
    found = [command.line for command in commands(text) if command.kind == "sh" and "pytest" in command.line]
    if len(found) != 1:
        raise SystemExit(f"README.md and docs: need one sh command that runs pytest, got {found}")
    return found[0]


def other_commands(text: str, minutes: str | None) -> Iterator[str]:
    """Yields the other commands that run unchanged, with a lowered budget if `minutes` is given."""
    tests = command_for_tests(text)
    for command in dict.fromkeys(commands(text)):  # a command that several pages have runs once
        if command.kind == "sh server":
            yield f"timeout --preserve-status --signal=TERM 12 {command.line} || test $? -eq 143"
        elif command.kind == "sh" and command.line != tests:
            yield lowered(command.line, minutes) if minutes else command.line


def lowered(line: str, minutes: str) -> str:
    """Returns a command with a budget of `minutes` and the minimum number of rounds.

    Findings are checked once, for the best trial: to explain another trial, only its pass runs.
    """
    line = RUN.sub(f"autotune run study.budget.minutes={minutes}", line)
    line = EXPLAIN.sub(f"autotune explain --passes lines --minutes {0 if '--trial' in line else minutes}", line)
    return VERIFY.sub(f"autotune verify --rounds 2 --minutes {minutes}", line)


def main(which: str, minutes: str | None = None) -> None:
    """Prints the commands for .ci/run."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    print(command_for_tests(text) if which == "tests" else "\n".join(other_commands(text, minutes)))


if __name__ == "__main__":
    main(*sys.argv[1:])
