"""Runs single trials of one program for the benchmarks, through the real launcher and harness, each in its own processes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from autotune.config.command import CommandTemplate
from autotune.failures import classify
from autotune.harness import protocol
from autotune.knobs.catalogue import knob
from autotune.launchers.base import Deadlines, Ended, Launch, Launcher
from autotune.records import Knobs, Outcome
from autotune.trials.settings import compile_cache

POLL_S = 0.1


@dataclass(kw_only=True)
class Measured:
    """The measurement of one trial.

    Attributes:
        rate_per_s: units per second over all ranks; None without a measurement.
        outcome, reason: how the trial ended.
        seconds: time from the launch until the last process had exited.
        result: rank 0's result; None without one.
        start: "fresh" or "warm".
        ready_s: time from the launch until torch was imported; None if it was not imported.
    """

    rate_per_s: float | None
    outcome: Outcome
    reason: str
    seconds: float
    result: protocol.RankResult | None = field(default=None, repr=False)
    start: str = "fresh"
    ready_s: float | None = None

    @property
    def not_applied(self) -> dict[str, str]:
        """Knobs that did not take effect, each with the reason."""
        reports = self.result.knobs if self.result else {}
        return {key: f"{r.status}: {r.reason}" for key, r in reports.items() if r.status != protocol.APPLIED}


class Bench:
    """Runs trials of one command. The first trial must be the baseline, which finds out which loader trains.

    Args:
        command: the program.
        launcher: starts the trials.
        folder: folder of the trials, used for nothing else.
        cache: folder of the compile cache; None for `folder`.
        memory_limit_bytes, tokens_per_sample: as in `Spec`.
    """

    def __init__(
        self,
        command: CommandTemplate,
        launcher: Launcher,
        folder: Path,
        *,
        cache: Path | None = None,
        memory_limit_bytes: int | None = None,
        tokens_per_sample: int | None = None,
    ) -> None:
        self.command = command
        self.launcher = launcher
        self.folder = folder
        self.cache = cache or folder
        self.memory_limit_bytes = memory_limit_bytes
        self.tokens_per_sample = tokens_per_sample
        self.target: list[dict[str, object]] | None = None
        self.observed: Knobs = {}
        self.last_folder = folder
        self._num_trials = 0

    def measure(self, knobs: Knobs, rules: protocol.MeasureRules, *, warm: tuple[str, ...] = ()) -> Measured:
        """Runs a trial and returns its measurement.

        Args:
            knobs: the knobs to change; all others stay as in the program.
            rules: when to stop.
            warm: as in `Launch`.
        """
        number, self._num_trials = self._num_trials, self._num_trials + 1
        spec = self._spec(number, knobs, rules)
        self.last_folder = Path(spec.folder)
        launch = Launch(
            argv=self.command.argv({**self.command.placeholders, **knobs}),
            cwd=self.command.cwd,
            env=compile_cache(self.cache)
            | {name: value for key in knobs for name, value in knob(key).environment(knobs[key]).items()},
            folder=self.last_folder,
            spec=spec,
            deadlines=Deadlines(),
            warm=warm,
        )
        ended = self._wait(launch)
        outcome, reason = classify(ended.facts(spec))
        result = ended.results[0] if ended.results else None
        if number == 0 and result:
            self.target, self.observed = result.target, result.observed
        rates = [r.throughput_per_s for r in ended.results]
        total = sum(rate for rate in rates if rate is not None) if outcome.has_value and None not in rates else None
        return Measured(
            rate_per_s=total,
            outcome=outcome,
            reason=reason,
            seconds=ended.seconds,
            result=result,
            start=ended.start,
            ready_s=ended.evidence.get("ready_s"),
        )

    def _spec(self, number: int, knobs: Knobs, rules: protocol.MeasureRules) -> protocol.Spec:
        passed = {key: knobs.get(key, own) for key, own in self.command.placeholders.items()}
        return protocol.Spec(
            trial=number,
            nonce=f"bench{number}",
            folder=str(self.folder / f"{number:04d}"),
            knobs={key: value for key, value in knobs.items() if key not in passed},
            passed=passed,
            target=self.target,
            rules=rules,
            memory_limit_bytes=self.memory_limit_bytes,
            tokens_per_sample=self.tokens_per_sample,
        )

    def _wait(self, launch: Launch) -> Ended:
        running = self.launcher.start(launch)
        try:
            while (ended := running.poll()) is None:
                time.sleep(POLL_S)
        except BaseException:
            running.stop("the benchmark was stopped")
            raise
        return ended
