"""Defines all exceptions that autotune raises.

    AutotuneError            exit code 1: a fault of autotune itself
    ├── BadInput             exit code 2: what the user typed or wrote cannot be done
    │   ├── NoNode           no machine is available for a trial, or the machine cannot run the study's trials
    │   └── Unreadable       a file that a pass of `explain` wrote cannot be used; the message says why
    ├── FolderLost           exit code 2: the study's folder cannot be written any more: full, read-only or deleted
    ├── NothingWorked        exit code 3: the unchanged program does not train, or the first changed settings all fail alike
    ├── ClaimBroken          exit code 4: `verify` found less speed-up than the file claims
    ├── NotMeasured          exit code 5: `verify` could not measure what it had to compare
    └── Interrupted          exit code 130: the study ended early, mostly by the user; everything measured is on disk

A failed trial raises no exception: its record has an outcome, a reason and evidence (records.py).
Errors of other libraries are translated into these exceptions where they are caught.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutotuneError(Exception):
    """Base of everything autotune raises on purpose."""

    exit_code = 1


class BadInput(AutotuneError):
    """Input that cannot be used. It carries every problem that was found, so the user sees all of them at once.

    Each problem reads: `<full key or path>: <what is wrong>, got <value>. <What is allowed, nearest first>. <What to do.>`
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class NoNode(BadInput):
    """No machine is available for a trial that waited for one, or the machine cannot run the study's trials."""


class Unreadable(BadInput):
    """A file that a pass of `explain` wrote cannot be used. The explanation lacks the file's contents and says why."""


class FolderLost(AutotuneError):
    """The study's folder cannot be written any more. What was written before still exists, unless the folder was deleted."""

    exit_code = 2


class NothingWorked(AutotuneError):
    """The unchanged program does not train, or the first configurations that change it all fail in the same way."""

    exit_code = 3


class ClaimBroken(AutotuneError):
    """The speed-up that a verified file claims does not hold on this machine now."""

    exit_code = 4


class NotMeasured(AutotuneError):
    """No round was completed, so it is not known whether a file's claim holds."""

    exit_code = 5


class Interrupted(AutotuneError):
    """The study ended early: the user stopped it, or it could not go on. What was measured is on disk."""

    exit_code = 130


def nearest(word: str, allowed: Iterable[str]) -> list[str]:
    """Returns the allowed words, most similar to `word` first. "train.lr" counts as very similar to its last part, "lr"."""
    ranked = [(_likeness(word.lower(), a.lower()), a) for a in allowed]
    return [a for _, a in sorted(ranked, key=lambda pair: (-pair[0], pair[1]))]


def _likeness(word: str, allowed: str) -> float:
    whole = difflib.SequenceMatcher(None, word, allowed).ratio()
    last = allowed.rpartition(".")[2]
    return max(whole, 0.99) if word == last and last != allowed else whole


def one_of(word: str, allowed: Iterable[str], *, show: int = 12) -> str:
    """Returns "Did you mean 'x'? Allowed: x, y, z." for a word that is not among `allowed`."""
    ranked = nearest(word, allowed)
    if not ranked:
        return "Nothing is allowed here."
    named = [*ranked, *(a.rpartition(".")[2] for a in ranked[:1])]
    close = difflib.get_close_matches(word.lower(), [a.lower() for a in named], n=1, cutoff=0.6)
    hint = f"Did you mean {ranked[0]!r}? " if close else ""
    show += len(ranked) == show + 1  # "and 1 more" would be as long as the word itself
    more = f" and {len(ranked) - show} more" if len(ranked) > show else ""
    return f"{hint}Allowed: {', '.join(ranked[:show])}{more}."
