"""Compares predicted gains with measured ones, and counts how often predictions held."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autotune.explain.evidence import Evidence
from autotune.explain.findings import Finding, ranked
from autotune.explain.gains import LEAST_GAIN, Gain, measured_gain_of
from autotune.explain.trials import NORMAL_95
from autotune.explained import FIXED, WITHOUT
from autotune.knobs.base import value_text
from autotune.stats import Noise, paired_ratio

TRIALS, PAIRS = "trials of this study", "pairs"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A comparison of a predicted gain with a measurement.

    Attributes:
        trial: number of the explained trial.
        cause, where: cause and place of the finding.
        remedy: what was tried, such as "loader.num_workers=2", "without decode" or the command of the corrected program.
        how: how the gain was measured. TRIALS: by trials of the study. Otherwise by pairs: with and without the setting
            (PAIRS), with and without the cause (WITHOUT), or of the unchanged program and a corrected program (FIXED).
        predicted, measured: the predicted and the measured gain of the remedy; for WITHOUT, the gain if the cause took no
            time at all.
        num_pairs: number of pairs measured for the check; 0 for TRIALS.
    """

    trial: int
    cause: str
    where: str
    remedy: str
    how: str
    predicted: Gain
    measured: Gain
    num_pairs: int = 0

    @property
    def is_held(self) -> bool:
        """Whether the measured gain lies inside the predicted interval."""
        return self.predicted.holds(self.measured.mid)

    def as_json(self) -> dict[str, Any]:
        """Returns the check as plain JSON values."""
        return {**asdict(self), "held": self.is_held}


def by_trials(findings: Sequence[Finding], evidence: Evidence) -> tuple[list[Finding], list[Check]]:
    """Returns the findings, with gains from the study's trials where possible, and the checks made.

    A gain measured by trials replaces a rule's prediction. A gain estimated from similar trials replaces the prediction only if
    the estimate's interval is narrower. If trials show that a setting gains less than LEAST_GAIN, the finding is left out. It
    stays without the setting if a change of the code may help instead.
    """
    kept, checks = [], []
    for finding in findings:
        known = evidence.effect(finding.knob, finding.value) if finding.knob and finding.value is not None else None
        if known is None:
            kept.append(finding)
            continue
        if known.kind == "measured":
            checks.append(check_of(finding, known, trial=evidence.record.number, how=TRIALS))
            finding = with_check(finding, checks[-1])
        elif known.high - known.low < finding.gain.high - finding.gain.low:
            finding = replace(finding, gain=known, basis="trials near this configuration")
        kept.append(finding)
    return ranked(kept), checks


def check_of(finding: Finding, measured: Gain, *, trial: int, how: str, remedy: str = "", num_pairs: int = 0) -> Check:
    """Returns a check that compares a finding's predicted gain with a measured one."""
    return Check(
        trial=trial,
        cause=finding.cause,
        where=finding.where,
        remedy=remedy or _remedy(finding),
        how=how,
        predicted=finding.without.gain if how == WITHOUT and finding.without else finding.gain,
        measured=measured,
        num_pairs=num_pairs,
    )


def _remedy(finding: Finding) -> str:
    return _setting(finding) if finding.knob or not finding.without else f"without {finding.without.name}"


def _setting(finding: Finding) -> str:
    return f"{finding.knob}={value_text(finding.value)}"


def with_check(finding: Finding, check: Check) -> Finding:
    """Returns a finding whose gain is replaced by the gain that a check measured.

    If the setting gains nothing, but a change of the code may help, the setting is removed from the finding, and the gain
    becomes an upper bound for that change. If the program was measured without the cause (WITHOUT), the measured gain is
    reduced, because a change of the code leaves part of the cost. If this measurement is less certain than the prediction,
    the prediction stays.
    """
    if check.how == WITHOUT and finding.without:
        basis = (
            f"{check.num_pairs} pairs, alternately with and without this cost, minus the part that a code change usually leaves"
        )
        if check.measured.low <= finding.gain.low and check.measured.high >= finding.gain.high:
            basis = f"{finding.basis}; the pairs with and without this cost vary too much for a better estimate"
            return replace(finding, basis=basis, check=check.as_json())
        return replace(finding, gain=finding.without.remedied(check.measured), basis=basis, check=check.as_json())
    if check.measured.mid < LEAST_GAIN and finding.code:
        return without_setting(finding)
    basis = f"{check.num_pairs} pairs, measured alternately" if check.num_pairs else check.how
    return replace(finding, gain=check.measured, basis=basis, check=check.as_json())


def without_setting(finding: Finding) -> Finding:
    """Returns a finding without its setting, which gained nothing or failed. Its gain becomes a bound for code changes."""
    basis = f"{finding.basis}; {_setting(finding)} was tried and did not help"
    return replace(finding, gain=replace(finding.gain, low=0.0, kind="bound"), basis=basis, knob="", value=None)


def measured_gain(pairs: Sequence[tuple[float, float]], noise: Noise) -> Gain:
    """Returns the gain of one program over another, measured in pairs.

    Args:
        pairs: scores of the changed and the unchanged program in each pair.
        noise: spread of one measurement, as far as it is known.
    """
    ratio = paired_ratio([new for new, _ in pairs], [old for _, old in pairs], noise=noise)
    if ratio.ci is None:  # a single pair
        return measured_gain_of(ratio.ratio, NORMAL_95 * noise.spread * math.sqrt(2 / len(pairs)))
    return Gain(low=ratio.ci[0] - 1, mid=ratio.ratio - 1, high=ratio.ci[1] - 1, kind="measured")


def accuracy(checks: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns how many predictions were tried, and how many held: {"checked", "held"}.

    Checks of corrected programs do not count, because a fix may remove only part of the cost, or nothing.
    """
    known = [check for check in checks if check.get("how") != FIXED]
    return {"checked": len(known), "held": sum(bool(check["held"]) for check in known)}
