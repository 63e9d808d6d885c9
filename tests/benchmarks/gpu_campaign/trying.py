"""Runs single trials for the campaign and stores what was measured, each under its own name."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.config.compose import Composed, compose
from autotune.harness.protocol import MeasureRules
from autotune.launchers.local import LocalLauncher
from autotune.records import Knobs
from tests.benchmarks.gpu_campaign.checks import Place
from tests.benchmarks.trials import Bench

SCREENING, FINALS = MeasureRules(), MeasureRules(half_width_frac=0.005, slow_max_s=20.0)
# Rules of a dry run: long enough to show that something is measured, too short for the numbers to mean anything.
DRY = MeasureRules(
    warmup_min_device_s=0.05,
    warmup_max_s=0.5,
    block_min_s=0.01,
    min_s=0.1,
    max_s=0.5,
    slow_max_s=0.5,
    promoted_max_s=0.5,
    drain_max_s=0.2,
)
DRY_OVERRIDES = (
    *(
        f"measure.{stage}.{field.name}={getattr(DRY, field.name)}"
        for stage in ("screening", "finals")
        for field in dataclasses.fields(DRY)
        if getattr(DRY, field.name) != field.default
    ),
    "measure.quiet=false",
    "parity.steps=0",
)


class Trials:
    """Trials of one program in a stage. The baseline comes first, because later trials must know which loader trains."""

    def __init__(self, place: Place, name: str, bench: Bench) -> None:
        self.place, self.name, self.bench = place, name, bench

    def measure(self, knobs: Knobs, rules: MeasureRules, *, again: int = 0) -> dict[str, Any]:
        """Returns the measurement of a configuration; runs the trial unless an earlier run of the command has done so.

        Args:
            knobs: the knobs to change.
            rules: when to stop; ignored in a dry run, which has its own rules.
            again: number of the repeat.

        Returns:
            {"rate_per_s", "outcome", "reason", "seconds", "not_applied", "unit", "memory", "device_rate_per_s",
            "loader_rate_per_s", "clock_gap_frac", "window_s"}; an unknown value is None.
        """
        words = " ".join(f"{key}={value}" for key, value in knobs.items()) or "as it is"
        return dict(self.place.kept(f"{self.name}: {words} #{again}", lambda: self._measured(knobs, rules)))

    def _measured(self, knobs: Knobs, rules: MeasureRules) -> dict[str, Any]:
        if knobs and not self.bench.observed:
            self.bench.measure({}, DRY)  # an earlier run measured the baseline: find the loader again
        is_dry = self.place.is_dry
        measured = self.bench.measure(knobs, DRY if is_dry else rules, warm=("torch",) if is_dry and knobs else ())
        result = measured.result
        print(f"         {self.name}  {knobs or 'as it is'}  {measured.rate_per_s or measured.reason}", flush=True)
        return {
            "rate_per_s": measured.rate_per_s,
            "outcome": str(measured.outcome),
            "reason": measured.reason,
            "seconds": measured.seconds,
            "not_applied": measured.not_applied,
            "unit": result.unit if result else "",
            "memory": result.memory if result else {},
            "device_rate_per_s": result.device_rate_per_s if result else None,
            "loader_rate_per_s": result.loader_rate_per_s if result else None,
            "clock_gap_frac": result.window.clock_gap_frac if result and result.window else None,
            "window_s": result.window.seconds if result and result.window else None,
        }


def recipe(place: Place, name: str, overrides: Sequence[str], **options: Any) -> Trials:
    """Returns trials of a recipe.

    Args:
        place: the stage's place.
        name: name of the program, under which measurements are stored.
        overrides: KEY=VALUE overrides of the configuration.
        options: further arguments of `Bench`.
    """
    return _trials(place, name, compose(list(overrides), command=None), **options)


def command(place: Place, name: str, words: Sequence[str]) -> Trials:
    """Returns trials of a command."""
    return _trials(place, name, compose([], command=list(words)))


def _trials(place: Place, name: str, composed: Composed, **options: Any) -> Trials:
    cache = place.folder / name
    cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="trials-", dir=cache))  # new: earlier results do not count here
    return Trials(place, name, Bench(composed.command, LocalLauncher(), folder, cache=cache, **options))
