"""Defines the document that explains a study: explanation.json, and `explanation` in its summary.

{"explained": [{"trial", "role": "best|baseline|asked", "passes": {pass: {"trial", "outcome", "reason"}},
                "phases_s": {phase: seconds per step, by `Evidence.phases_s`} | {}, "findings": [as Finding.as_json],
                "notes": [sentence]}],
 "checks": [as Check.as_json], "accuracy": {"checked", "held"}, "skipped": why nothing was explained, or ""}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.explain.checks import Check, accuracy
from autotune.explain.evidence import Evidence
from autotune.explain.findings import Finding
from autotune.explained import check_key
from autotune.records import Kind, Outcome, TrialRecord

BEST, BASELINE, ASKED = "best", "baseline", "asked"
Document = dict[str, Any]


def empty(skipped: str = "") -> Document:
    """Returns a document without any explained trial."""
    return {"explained": [], "checks": [], "accuracy": accuracy([]), "skipped": skipped}


def entry(
    evidence: Evidence, role: str, findings: Sequence[Finding], *, passes: Mapping[str, TrialRecord], notes: Sequence[str]
) -> dict[str, Any]:
    """Returns the entry of one explained trial."""
    ran = {name: {"trial": one.number, "outcome": str(one.outcome), "reason": one.reason} for name, one in passes.items()}
    return {
        "trial": evidence.record.number,
        "role": role,
        "passes": ran,
        "phases_s": dict(evidence.phases_s) if evidence.lines else {},
        "findings": [finding.as_json() for finding in findings],
        "notes": list(notes),
    }


def with_entry(document: Document, added: Mapping[str, Any], checks: Sequence[Check]) -> Document:
    """Returns a document with one more explained trial and its checks.

    The new entry replaces an earlier entry of the same trial. The new checks replace earlier checks of the same finding and
    remedy.
    """
    kept = [one for one in document["explained"] if one["trial"] != added["trial"]]
    return {**_with_checks(document, checks), "explained": [*kept, dict(added)], "skipped": ""}


def with_best(document: Document | None, number: int) -> Document | None:
    """Returns a document in which only trial `number` has the role BEST. A resumed study may have a new best trial."""
    explained = [
        {**one, "role": ASKED} if one["role"] == BEST and one["trial"] != number else one
        for one in (document or {}).get("explained", ())
    ]
    return document and {**document, "explained": explained}


def with_check(document: Document, check: Check) -> Document:
    """Returns a document with one more check, which is also written into its finding."""
    explained = [_noted(one, check) if one["trial"] == check.trial else one for one in document["explained"]]
    return {**_with_checks(document, [check]), "explained": explained}


def _noted(one: dict[str, Any], check: Check) -> dict[str, Any]:
    findings = [
        {**finding, "check": check.as_json()} if (finding["cause"], finding["where"]) == (check.cause, check.where) else finding
        for finding in one["findings"]
    ]
    return {**one, "findings": findings}


def _with_checks(document: Document, checks: Sequence[Check]) -> Document:
    new = [check.as_json() for check in checks]
    known = [*(one for one in document["checks"] if check_key(one) not in map(check_key, new)), *new]
    return {**document, "checks": known, "accuracy": accuracy(known)}


def passes_of(number: int, records: Sequence[TrialRecord]) -> dict[str, TrialRecord]:
    """Returns, for each pass, the trial that ran the pass to explain trial `number`.

    This is the latest trial that succeeded or, if none did, the first that failed.
    """
    found: dict[str, TrialRecord] = {}
    for record in records:
        is_of = record.kind is Kind.explain and record.repeats == number and record.outcome is not Outcome.interrupted
        if is_of and (record.outcome is Outcome.ok or record.origin not in found):
            found[record.origin] = record
    return found


def folders_of(passes: Mapping[str, TrialRecord], place: Path) -> dict[str, Path]:
    """Returns pass -> folder of the trial that ran it, in `place`, the folder of the study's trials."""
    return {name: place / f"{record.number:04d}" for name, record in passes.items()}
