"""Finds out how a program's processes ended, from the system or from the parent that started them."""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

from autotune.log_messages import RELAYED_NAME, raised_in

# torchrun's report on failed processes at the end of its log: first a list, then the root cause.
FAILURES = re.compile(r"Failures:\s.*?Root Cause \(first observed failure\):", re.DOTALL)
REPORT = re.compile(FAILURES.pattern + r".*?^=+$", re.DOTALL | re.MULTILINE)
FAILED_RANK = re.compile(r"^\s*rank\s*: (\d+)[^\n]*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
# srun's lines: "srun: error: n2: tasks 1-3: Exited with exit code 1", "srun: error: n2: task 1: Killed". Once srun has
# given up the job step, it ends the remaining tasks itself, so its lines about these tasks do not show the cause.
TASK_FAILED = re.compile(
    r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|([A-Z][^\n(]*))", re.MULTILINE
)
GIVEN_UP = re.compile(r"^srun: (?:Job step aborted|forcing job termination|Force Terminated|Terminating)", re.MULTILINE)
SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
OUT_OF_MEMORY = "Out Of Memory"
ENDED_FOR_MEMORY = re.compile(rf"^srun: error: \S+: tasks? [\d,-]+: {OUT_OF_MEMORY}|slurmstepd.*oom.kill", re.MULTILINE)


class Killed(NamedTuple):
    """A signal that ended a process of the program.

    Attributes:
        name: "SIGSEGV"; "" for no signal.
        is_relayed: whether a shell or another parent reported the signal.
        rank: rank of the process; None when unknown.
        host: the node that the process ran on, if Slurm has named it; "" otherwise.
    """

    name: str
    is_relayed: bool = False
    rank: int | None = None
    host: str = ""


class FailedRank(NamedTuple):
    """A rank that torchrun or srun saw fail.

    Attributes:
        rank: its number.
        code: its exit status, or minus the number of the signal that ended it.
        host: the node that it ran on, if srun names it; "" otherwise.
    """

    rank: int
    code: int
    host: str = ""


def reports_before(log: str, tail: str) -> str:
    """Returns torchrun's reports that begin before the tail of a log.

    On several nodes, the torchrun that saw a rank fail may report long before the last torchrun ends, so the tail may lack this
    report.
    """
    cut = len(log) - len(tail)
    return "".join(f"{report[0]}\n" for report in REPORT.finditer(log) if report.start() < cut)


def failed_ranks(log: str) -> list[FailedRank]:
    """Returns the ranks that torchrun or srun names as failed at a log's end, the root cause first; [] if none is named.

    On several nodes each torchrun reports on its own ranks. torchrun polls ten times a second and records whole seconds, so
    several ranks may seem to fail at the same time. Then a rank that a signal ended counts as the root cause, unless the signal
    is SIGTERM, which torchrun itself sends to the other ranks.
    """
    listed = list(FAILURES.finditer(log))
    if not listed:
        return _failed_tasks(log)
    ends = [*(report.start() for report in listed[1:]), len(log)]
    parts = [part for report, end in zip(listed, ends, strict=True) for part in (log[report.end() : end], report[0])]
    found = [FailedRank(int(rank), int(code)) for part in parts for rank, code in FAILED_RANK.findall(part)]
    return sorted(found, key=lambda failed: not _is_killed(failed))


def _failed_tasks(log: str) -> list[FailedRank]:
    """Returns the tasks that srun names as failed, in its order."""
    given_up = GIVEN_UP.search(log)
    said = log[: given_up.start()] if given_up else log
    found = []
    for host, task, status, words in TASK_FAILED.findall(said):
        number = signal.SIGKILL if words.startswith(OUT_OF_MEMORY) else SIGNALS.get(words.strip(), 0)
        if status or number not in (0, signal.SIGTERM):  # srun ends the other tasks with SIGTERM
            found.append(FailedRank(int(task), int(status) if status else -number, host))
    return found


def killed(own: str | None, exit_code: int | None, log: str) -> Killed:
    """Returns the signal that ended the program, or the signal that ended one of its processes, after which the parent gave up.

    Args:
        own: name of the signal that ended the first process; None if there was none.
        exit_code: exit status of the first process; None if it has none, for example because it was ended after a rank failed.
        log: end of standard error.
    """
    if own:
        return Killed(own)
    first = next(iter(failed_ranks(log)), None) if exit_code != 0 else None
    if first is not None and first.code < 0 and (exit_code or first.host):
        return Killed(signal_name(-first.code), True, first.rank, first.host)
    if first is not None and first.host:  # srun killed the other ranks because of this one, and exited with their status
        return Killed("")
    if exit_code is not None and 128 < exit_code <= 128 + 64:
        return Killed(signal_name(exit_code - 128), True)
    if not exit_code:
        return Killed("")
    relayed = RELAYED_NAME.search(raised_in(log))
    return Killed(relayed[1], True) if relayed else Killed("")


def _is_killed(failed: FailedRank) -> bool:
    return failed.code < 0 and failed.code != -signal.SIGTERM


def signal_name(number: int) -> str:
    """Returns "SIGSEGV" for 11, "signal 40" for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
