"""A program whose own loss is no number: it is measured as it is, and only its losses cannot be compared with anything.

Toys and smoke tests diverge, and so does a program whose learning rate waits to be tuned: how fast its steps are is a question
all the same. What the program as it is loses is then held against no trial; what it keeps is, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.failures import LOSS, SCALING
from autotune.records import TrialRecord

NOT_FINITE = "not_finite"  # in the evidence, as `failures.not_finite` has it
EXCUSABLE = frozenset({LOSS, SCALING})
ONLY_SPEED = "What is measured is the speed of such steps; a training that converges may be faster or slower"


def excused(records: Sequence[TrialRecord]) -> frozenset[str]:
    """Returns what is not finite in the program as it is, of LOSS and SCALING."""
    return frozenset(kind for record in records if not record.changed for kind in record.evidence.get(NOT_FINITE, ()))


def loss_words(records: Sequence[TrialRecord]) -> str:
    """Returns that the program loses its loss by itself, and when; "" when it does not.

    Args:
        records: by number; the first that has seen it speaks.
    """
    if not (told := _first(records, LOSS)):
        return ""
    return f"the program's own loss is not finite ({told}): losses cannot be compared"


def caveat(records: Sequence[TrialRecord]) -> str:
    """Returns what is to be known of a program that is not finite as it is, in sentences; "" for one that is.

    Args:
        records: by number.
    """
    said = []
    if words := loss_words(records):
        said.append(f"{words}, so changes of numerics are `not checked`")
    if told := _first(records, SCALING):
        said.append(f"the program's own gradients overflow ({told})")
    return f"{'; '.join(said)}. {ONLY_SPEED}" if said else ""


def _first(records: Sequence[TrialRecord], kind: str) -> str:
    for record in records:
        if not record.changed and (when := record.evidence.get(NOT_FINITE, {}).get(kind)):
            where = f"trial {record.number}, which changes nothing" if record.number else "the baseline itself"
            return f"{when}, in {where}"
    return ""
