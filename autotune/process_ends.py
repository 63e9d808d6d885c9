"""Finds out how a program's processes ended, from the system or from the parent that started them."""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

from autotune.log_messages import RELAYED_NAME, raised_in

# torchrun's report on failed processes at the end of its log: first a list, then the root cause.
FAILURES = re.compile(r"Failures:\s.*?Root Cause \(first observed failure\):", re.DOTALL)
FAILED_RANK = re.compile(r"^\s*rank\s*: (\d+)[^\n]*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)


class Killed(NamedTuple):
    """A signal that ended a process of the program.

    Attributes:
        name: "SIGSEGV"; "" if there was none.
        is_relayed: whether a shell or another parent reported the signal.
        rank: rank of the process; None when unknown.
    """

    name: str
    is_relayed: bool = False
    rank: int | None = None


class FailedRank(NamedTuple):
    """A rank that torchrun saw fail.

    Attributes:
        rank: its number.
        code: its exit status, or minus the number of the signal that ended it.
    """

    rank: int
    code: int


def failed_ranks(log: str) -> list[FailedRank]:
    """Returns the ranks that torchrun names as failed at a log's end, the root cause first; [] if it names none.

    torchrun polls ten times a second and records whole seconds, so several ranks may seem to fail at once. Then a rank that a
    signal ended is taken as the root cause, unless the signal is SIGTERM, which torchrun itself sends to the other ranks.
    """
    listed = list(FAILURES.finditer(log))
    if not listed:
        return []
    others, root = listed[-1][0], log[listed[-1].end() :]
    found = [FailedRank(int(rank), int(code)) for part in (root, others) for rank, code in FAILED_RANK.findall(part)]
    return sorted(found, key=lambda failed: not _is_killed(failed))


def killed(own: str | None, exit_code: int | None, log: str) -> Killed:
    """Returns the signal that ended the program, or that ended one of its processes and so made the parent give up.

    Args:
        own: name of the signal that ended the first process; None if there was none.
        exit_code: exit status of the first process; None if it has none.
        log: end of standard error.
    """
    if own:
        return Killed(own)
    if exit_code is not None and 128 < exit_code <= 128 + 64:
        return Killed(_name(exit_code - 128), True)
    if not exit_code:
        return Killed("")
    first = next(iter(failed_ranks(log)), None)
    if first is not None and first.code < 0:
        return Killed(_name(-first.code), True, first.rank)
    relayed = RELAYED_NAME.search(raised_in(log))
    return Killed(relayed[1], True) if relayed else Killed("")


def _is_killed(failed: FailedRank) -> bool:
    return failed.code < 0 and failed.code != -signal.SIGTERM


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
