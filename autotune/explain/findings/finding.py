"""Defines a finding: a cause, its place, its evidence, what removing it would gain, and how to remove it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.explain.evidence import Evidence
from autotune.explain.gains import Gain
from autotune.records import KnobValue


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What costs time in one configuration.

    Attributes:
        cause: one of `findings.RULES`.
        where: "file:line", a stage of the input pipeline, a kernel, or "rank 1".
        evidence: what was seen, with numbers.
        gain: what removing the cause would gain.
        basis: what the size of the gain is based on.
        knob, value: setting that removes the cause; "" and None if only a change of the code removes it.
        code: what to change in the program, in words.
        check: what became of trying the remedy, see `checks.Check.as_json`; None if it was not tried.
    """

    cause: str
    where: str
    evidence: str
    gain: Gain
    basis: str
    knob: str = ""
    value: KnobValue | None = None
    code: str = ""
    check: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the finding as plain JSON values."""
        remedy = {"knob": self.knob, "value": self.value} if self.knob else {"code": self.code}
        return {
            "cause": self.cause,
            "where": self.where,
            "evidence": self.evidence,
            "gain": self.gain.as_json(),
            "basis": self.basis,
            "remedy": remedy,
            "check": self.check,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Finding:
        """Returns the finding that `as_json` wrote."""
        texts = {name: raw[name] for name in ("cause", "where", "evidence", "basis")}
        return cls(**texts, **raw["remedy"], gain=Gain.from_json(raw["gain"]), check=raw.get("check"))


Rule = Callable[[Evidence], Iterable[Finding]]


def ms(seconds: float) -> str:
    """Returns seconds in milliseconds: "12.3 ms", "0.042 ms"."""
    return f"{seconds * 1e3:.3g} ms"


def percent(share: float) -> str:
    """Returns a share in percent: "38 %"."""
    return f"{share:.0%}".replace("%", " %")
