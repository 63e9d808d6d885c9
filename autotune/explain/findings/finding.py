"""Defines a finding: a cause, its place, its evidence, what removing it would gain, and how to remove it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autotune.explain.evidence import Evidence
from autotune.explain.gains import Gain, Saved, gain_of_part
from autotune.harness.explain.documents import FUNCTION
from autotune.plain_json import from_json
from autotune.records import KnobValue


@dataclass(frozen=True, kw_only=True)
class Without:
    """How to measure the cost of a cause without editing the program: the harness skips loader stages or a function.

    Attributes:
        stages: what to skip, see `harness/explain/skipping.py`.
        gain: predicted gain if the skipped stages took no time.
        remaining: share of the skipped time that is left after a remedy, as (largest, usual, smallest).
        function: the function to skip, in words; "" for stages of the loader.
        limiting: the stages' share of the workers' work, if the workers limit the rate and have cores of their own; else None.
    """

    stages: tuple[str, ...]
    gain: Gain
    remaining: Saved
    function: str = ""
    limiting: float | None = None

    @property
    def name(self) -> str:
        """What is skipped, in words: "decode", "src/log.py: Journal.write"."""
        if self.function:
            return self.function
        given = (stage.removeprefix(f"{FUNCTION}: ") if stage.startswith(FUNCTION) else stage for stage in self.stages)
        return ", ".join(os.path.basename(each) for each in given)

    def remedied(self, measured: Gain) -> Gain:
        """Returns what a remedy gains, given the gain that was measured without the stages."""
        return gain_of_part(measured, self.remaining, "predicted", limiting=self.limiting)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that costs time in one configuration.

    Attributes:
        cause: one of `findings.RULES`.
        where: "file:line", a stage of the input pipeline, a kernel, or "rank 1".
        evidence: what was observed, with numbers.
        gain: what removing the cause would gain.
        basis: what the gain is computed from.
        knob, value: setting that removes the cause; "" and None if only a change of the code can remove it.
        code: what to change in the program, in words.
        without: how to measure the program without the cause; None if that is impossible.
        unskippable: why `without` is None, in words; "" if it is not None, or if the reason is obvious.
        check: result of trying the remedy, see `checks.Check.as_json`; None if it was not tried.
    """

    cause: str
    where: str
    evidence: str
    gain: Gain
    basis: str
    knob: str = ""
    value: KnobValue | None = None
    code: str = ""
    without: Without | None = None
    unskippable: str = ""
    check: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the finding as plain JSON values."""
        plain = asdict(self)
        knob, value, code = (plain.pop(name) for name in ("knob", "value", "code"))
        return {**plain, "remedy": {"knob": knob, "value": value} if knob else {"code": code}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Finding:
        """Returns the finding that `as_json` wrote."""
        return from_json({**raw, **raw["remedy"]}, cls)


# A rule is called only if the documents of the pass "lines" exist. Documents of other passes may be missing.
Rule = Callable[[Evidence], Iterable[Finding]]
