"""Handles programs whose own loss is not finite: their speed is measured, but losses cannot be compared.

Toy programs and smoke tests diverge, and so do programs whose learning rate is not tuned yet. Their speed still matters. So if
the unchanged program's loss is not finite, or its gradients are not, no trial is rejected for that reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.failures import LOSS, SCALING
from autotune.records import TrialRecord

NOT_FINITE = "not_finite"  # key in the evidence; holds the result of `failures.not_finite`
EXCUSABLE = frozenset({LOSS, SCALING})
ONLY_SPEED = "Only the speed of such steps is measured; a training that converges may be faster or slower"


def excused(records: Sequence[TrialRecord]) -> frozenset[str]:
    """Returns what is not finite in the unchanged program, among LOSS and SCALING (the gradients overflow)."""
    return frozenset(kind for record in records if _is_unchanged(record) for kind in record.evidence.get(NOT_FINITE, ()))


def loss_words(records: Sequence[TrialRecord]) -> str:
    """Returns a clause that says when and in which trial the program's own loss was first not finite; "" if it is finite."""
    if not (since := _first(records, LOSS)):
        return ""
    return f"the program's own loss is not finite ({since}): losses cannot be compared"


def caveat(records: Sequence[TrialRecord]) -> str:
    """Returns a caveat, in sentences, for a program whose own loss or gradients are not finite; "" for any other."""
    said = []
    if words := loss_words(records):
        said.append(f"{words}, so changes of numerics are `not checked`")
    if since := _first(records, SCALING):
        said.append(f"the program's own gradients overflow ({since})")
    return f"{'; '.join(said)}. {ONLY_SPEED}" if said else ""


def _is_unchanged(record: TrialRecord) -> bool:
    return not record.changed and record.is_of_program


def _first(records: Sequence[TrialRecord], kind: str) -> str:
    for record in records:
        if _is_unchanged(record) and (when := record.evidence.get(NOT_FINITE, {}).get(kind)):
            where = f"trial {record.number}, which changes nothing" if record.number else "the baseline itself"
            return f"{when}, in {where}"
    return ""
