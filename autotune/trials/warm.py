"""Decides which trials may start warm: as a fork of a process that has imported torch, not in a new interpreter.

That process also imports torchvision and torch's compiler if the program imports them. (Constructing an optimizer imports the
compiler.) It imports other installed libraries, too, if they take long to import and harness/libraries.py found that safe.

Only search trials may start warm. The baseline shows whether the program allows it. All reported measurements (finals,
attribution, compared losses) are made with a fresh start, as in the user's own runs.
"""

from __future__ import annotations

import re

from autotune.harness.protocol import RankResult
from autotune.knobs.catalogue import knob
from autotune.launchers.base import OF_TORCH
from autotune.records import Kind, Knobs, Outcome, TrialRecord

AUTO, WARM = "auto", "warm"
# Outcomes that a warm start may cause, if the trial failed before its first step.
DOUBTFUL = frozenset({Outcome.crash, Outcome.error, Outcome.timeout})
# A trial that failed after a warm start is repeated with a fresh start, until this many repeats have failed, too.
MAX_IN_VAIN = 2
COMPILER = "torch._dynamo"
WORTH_S = 0.2  # libraries are imported in advance if the baseline needed at least this long for those besides torch's own
NAME = re.compile(r"[\w.]{1,200}")
MAX_LIBRARIES = 1000


class WarmStarts:
    """Decides for each trial whether it may start warm, if `launch.warm` allows it, and learns from failures.

    Attributes:
        why_never: why no trial may start warm; "" if search trials may.
        is_whole: whether a warm start needs all of the modules imported, because some set variables before torch is imported.
    """

    def __init__(self, wanted: str) -> None:
        self.why_never = "the baseline has not shown yet whether the program allows it" if wanted == AUTO else "launch.warm=off"
        self._is_wanted, self.is_whole = wanted == AUTO, False
        self._modules: tuple[str, ...] = ()
        self._num_in_vain = 0

    def learn(self, first: RankResult) -> None:
        """Learns from the baseline whether the program allows warm starts."""
        if not self._is_wanted:
            return
        found = first.facts.get("startup") or {}
        # Whether the program imported the compiler, and had not changed a variable that the compiler reads.
        has_compiler = found.get("changed_before_compiler") == []
        modules = {"torch": True, COMPILER: has_compiler, "torchvision": bool(first.facts.get("torchvision"))}
        libraries = _worthwhile(found.get("imports"))
        of_torch = [name for name, is_there in modules.items() if is_there and name not in libraries]
        self._modules = (*libraries, *of_torch)
        if first.world_size > 1:
            self.why_never = "several processes train"
        elif not found.get("is_first"):
            self.why_never = "training does not run in the process that the command starts"
        elif (changed := found.get("changed")) and not (libraries and found.get("is_repeatable")):
            self.why_never = f"the program sets {', '.join(changed[:3])} before it imports torch"
        else:
            self.why_never, self.is_whole = "", bool(changed)

    def modules(self, kind: Kind, *, changed: Knobs, pinned: Knobs) -> tuple[str, ...]:
        """Returns the modules that are imported before a trial starts; () for a fresh start.

        Args:
            kind: kind of the trial.
            changed: the trial's knobs that differ from the baseline.
            pinned: knobs set in every trial. Their environment variables are set in the process that trials are forked from.
        """
        is_fresh = any(knob(key).needs_fresh_start(value) for key, value in changed.items())
        is_fresh = is_fresh or any(knob(key).is_before_torch for key in pinned)
        return () if self.why_never or kind is not Kind.search or is_fresh else self._modules

    def is_doubtful(self, record: TrialRecord) -> bool:
        """Whether a trial may have failed because it was started warm."""
        is_before_steps = record.start == WARM and not record.evidence.get("num_steps")
        return is_before_steps and record.outcome in DOUBTFUL and self._num_in_vain < MAX_IN_VAIN

    def judge(self, doubtful: TrialRecord, again: TrialRecord) -> str:
        """Learns from the fresh repeat of a trial that was started warm; returns a notice for the user, "" for none."""
        if not again.outcome.has_value:
            self._num_in_vain += 1
            return ""
        self.why_never = f"trial {again.number} failed when it was started warm, but not when it was started fresh"
        reason = f" ({doubtful.reason})" if doubtful.reason else ""
        return (
            f"Trial {again.number} failed when forked from a process that had imported torch{reason}, but ran in a fresh "
            "interpreter. From now on every trial starts in a fresh interpreter; launch.warm=off does this from the beginning."
        )


def _worthwhile(imports: object) -> tuple[str, ...]:
    """Returns the modules that a warm server imports in the program's order; () if they take too little time.

    Args:
        imports: module -> seconds, from the baseline's result, which the program may have overwritten.
    """
    if not isinstance(imports, dict) or len(imports) > MAX_LIBRARIES:
        return ()
    if not all(NAME.fullmatch(name) and isinstance(seconds, (int, float)) for name, seconds in imports.items()):
        return ()
    others_s = sum(seconds for name, seconds in imports.items() if name.partition(".")[0] not in OF_TORCH)
    return tuple(imports) if others_s >= WORTH_S else ()
