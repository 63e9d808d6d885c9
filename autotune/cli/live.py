"""Shows a running study on a terminal. Finished trials become rows of a table; the current state stays below the rows."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autotune.cli import trials, verdict
from autotune.cli.plain import View, budget_text, has_aims, left_text, plan_text
from autotune.cli.terminal import MAX_WIDTH, outcome_style
from autotune.harness.protocol import Progress
from autotune.quantities import clock_text, number_text, rate_text, ratio_text
from autotune.records import THROUGHPUT, Kind, Knobs, Outcome, StudyRecord, Summary, TrialRecord
from autotune.report.trials import is_better
from autotune.trials.events import Outlook
from autotune.wording import aims_text, changes_phrase, machine_text, objective_of, objective_text, score_of, warm_start_text

REFRESHES_PER_S = 4
MAX_SHOWN = 4  # maximum number of running trials that are shown
PHASE_WORDS = {
    "spawn": "starting",
    "import": "importing",
    "init": "building the model",
    "first_batch": "waiting for the first batch",
    "compile": "compiling",
    "warmup": "warming up",
    "steady": "measuring",
    "exit": "ending",
}


@dataclass
class _Running:
    """A trial that runs now."""

    kind: Kind
    knobs: Knobs
    why: str
    since_s: float
    progress: Progress | None = None


class LiveView(View):
    """Shows a study on a terminal.

    Args:
        console: the terminal.
        path: the study's folder.
        clock: returns monotonic seconds.
        budget_clock: returns the seconds of the study's clock, which measures the use of the budget; None for `clock`.
        begun_s: moment on the study's clock from which the budget counts; None for now.
    """

    def __init__(
        self,
        console: Console,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        budget_clock: Callable[[], float] | None = None,
        begun_s: float | None = None,
    ) -> None:
        self._console, self._path, self._clock = console, path, clock
        self._budget_clock = budget_clock or clock
        self._begun_s = self._budget_clock() if begun_s is None else begun_s
        self._study: StudyRecord | None = None
        self._baseline: TrialRecord | None = None
        # Baseline and searched trials with their negative scores, best first. Loss parity may rule out some of them later.
        self._rated: list[tuple[float, TrialRecord]] = []
        self._counts: dict[str, int] = {}
        self._running: dict[int, _Running] = {}
        self._slots: dict[str, Any] = {}  # set once, when the study starts, so that the table's columns stay the same
        self._outlook: tuple[Outlook, float] | None = None  # the latest outlook, and when it was reported
        self._spinner = Spinner("dots", style="key")
        self._live = Live(
            get_renderable=self.footer,
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stderr=False,
        )

    def started(self, study: StudyRecord) -> None:
        """Prints the header and starts the live part. When called again, prints which studies warm-start the search."""
        if self._study is None:
            self._slots = dict(study.slots)
            self._console.print(_header(study))
            self._live.start()
        elif taken_over := warm_start_text(study.warm_start):
            self._console.print(Text(f"warm start: {taken_over}", style="quiet"))
        self._study = study

    def resumed(self, trials: Sequence[TrialRecord], spent_s: float) -> None:
        """Shows the rows of the trials from earlier runs."""
        for trial in trials:
            self.trial_ended(trial)

    def planned(self, outlook: Outlook) -> None:
        """Prints how many search trials fit the budget."""
        self._console.print(Text(f"plan: {plan_text(outlook)}", style="quiet"))
        self.time_left(outlook)

    def time_left(self, outlook: Outlook) -> None:
        """Stores the remaining search time, which is shown next to the clock."""
        self._outlook = (outlook, self._budget_clock())

    def trial_started(self, number: int, kind: Kind, knobs: Knobs, why: str) -> None:
        """Shows the configuration of a trial that begins."""
        self._running[number] = _Running(kind=kind, knobs=knobs, why=why, since_s=self._clock())

    def progress(self, progress: Progress, number: int | None = None) -> None:
        """Shows the phase and step of trial `number`, or of the trial that started last if `number` is None."""
        if number is None:
            number = next(reversed(self._running), -1)
        if number in self._running:
            self._running[number].progress = progress

    def trial_ended(self, trial: TrialRecord) -> None:
        """Adds the trial's row above the live part."""
        self._counts[trial.outcome.value] = self._counts.get(trial.outcome.value, 0) + 1
        if trial.kind is Kind.baseline:
            self._baseline = trial
        shown, before = trial.as_json(), self._best.as_json() if self._best else None
        if trial.kind in (Kind.baseline, Kind.search) and (score := score_of(self._about, shown)):
            bisect.insort(self._rated, (-score, trial), key=lambda rated: rated[0])
        width = self._console.width
        if sum(self._counts.values()) == 1:  # the header shows the rates' unit, which is unknown until a trial has ended
            self._console.print(trials.table(width, about=self._about))
        baseline = score_of(self._about, self._baseline.as_json()) if self._baseline else None
        found = self._best
        best = found.number if found and found is not self._baseline else None
        row = trials.row(shown, width=width, about=self._about, baseline=baseline, best=best, before=before)
        self._console.print(row)
        self._running.pop(trial.number, None)

    def finals_started(self, trials: Sequence[int], reserved_s: float | None) -> None:
        """Draws a rule between the search and the finals."""
        names = ", ".join(f"{n:04d}" for n in trials[1:])
        self._console.print(Rule(f"finals: {names} and the baseline, side by side", style="quiet", align="left"))

    def attribution_started(self, trial: int, knobs: Sequence[str], left_s: float | None) -> None:
        """Draws a rule before the ablation of the winner."""
        words = f"attribution: the effect of each change of trial {trial:04d}, reverted one at a time"
        if not knobs:
            words = f"attribution: measures trial {trial:04d} without the changes that seem to have no effect"
        self._console.print(Rule(words, style="quiet", align="left"))

    def notice(self, message: str) -> None:
        """Prints one line above the live part."""
        self._console.print(Text(message, style="warn"))

    def finished(self, summary: Summary) -> None:
        """Ends the live part and prints the verdict."""
        self.close()
        self._console.print()
        self._console.print(verdict.panel(summary, self._path, is_said=True), width=min(self._console.width, MAX_WIDTH))

    def close(self) -> None:
        """Releases the terminal. Called at the end of every study, even after an exception."""
        self._live.stop()

    def footer(self) -> RenderableType:
        """Returns the live part: best so far, current trial, outcomes and time left."""
        width = self._console.width
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.width = width
        grid.add_column(width=7, no_wrap=True, style="quiet")
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_row("best", self._best_line())
        if not self._running:
            grid.add_row("now", Text("choosing what to try", style="quiet"))
            grid.add_row("", Text())
        for place, (number, running) in enumerate(list(self._running.items())[:MAX_SHOWN]):
            grid.add_row("" if place else "now", self._now_line(number, running))
            grid.add_row("", self._what_line(running))
        if (num_more := len(self._running) - MAX_SHOWN) > 0:
            grid.add_row("", Text(f"and {num_more} more", style="quiet"))
        grid.add_row("so far", self._outcomes_line())
        time_row = self._time_row(width)
        return Group(Rule(style="quiet"), grid, *([time_row] if time_row is not None else []))

    @property
    def _best(self) -> TrialRecord | None:
        """The best trial so far; None if no trial may win. It also changes when loss parity rules out an ended trial."""
        return next((trial for _, trial in self._rated if is_better(self._about, trial.as_json(), None)), None)

    def _best_line(self) -> Text:
        best = self._best
        if self._baseline is None:
            return Text("measuring the baseline first", style="quiet")
        if best is None:
            return Text("no trial that may win yet", style="quiet")
        if best is self._baseline:
            return Text(f"the baseline, {rate_text(self._baseline.value, self._baseline.unit)}")
        ratio = (best.score or 0.0) / max(self._baseline.score or 0.0, 1e-12)
        name, unit = objective_of(self._about), best.unit
        if name == THROUGHPUT:
            rates = f"  {rate_text(best.value, unit)} against {number_text(self._baseline.value)}  "
        else:
            own, base = (objective_text(name, side.objectives.get(name), unit) for side in (best, self._baseline))
            rates = f"  {own} against {base}  "
        return Text.assemble((ratio_text(ratio), "win"), rates, (changes_phrase(best.changed), "default"))

    def _now_line(self, number: int, running: _Running) -> Text:
        frame = self._spinner.render(self._clock())
        return Text.assemble(frame if isinstance(frame, Text) else "", f" trial {number:04d} {self._phase_words(running)}")

    def _what_line(self, running: _Running) -> Text:
        kind, knobs, why = running.kind, running.knobs, running.why
        what = "the program, unchanged" if kind is Kind.baseline or not knobs else changes_phrase(knobs)
        if kind in (Kind.parity, Kind.explain, Kind.check):
            return Text(why)
        return Text.assemble(
            f"{kind.value}: " if kind in (Kind.attribution, Kind.final) else "", what, (f"  {why}" if why else "", "quiet")
        )

    def _phase_words(self, running: _Running) -> str:
        words, progress = [PHASE_WORDS["spawn"]], running.progress
        if progress is not None:
            words = [PHASE_WORDS.get(progress.phase, progress.phase)]
            words += [f"step {progress.step}"] if progress.step else []
            words += [rate_text(progress.rate_per_s, self._unit)] if progress.rate_per_s else []
        return ", ".join([*words, _elapsed_text(self._clock() - running.since_s)])

    @property
    def _about(self) -> Summary:
        study = self._study
        return {"objective": study.objective if study else THROUGHPUT, "slots": self._slots, "unit": self._unit}

    @property
    def _unit(self) -> str:
        return self._baseline.unit if self._baseline else "samples"

    def _outcomes_line(self) -> Text:
        line = Text()
        for name, count in sorted(self._counts.items(), key=lambda pair: (not Outcome(pair[0]).has_value, pair[0])):
            line.append(f"{count} {name}", style=outcome_style(name)).append("  ")
        return line if self._counts else Text("no trial yet", style="quiet")

    def _time_row(self, width: int) -> Table | None:
        if self._study is None:
            return None
        if self._study.budget_s is None:
            return self._trials_row()
        spent_s = min(self._study.spent_s + self._budget_clock() - self._begun_s, self._study.budget_s)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=7, style="quiet")
        grid.add_column(width=7, justify="left", no_wrap=True)
        grid.add_column()
        grid.add_column(no_wrap=True, overflow="ellipsis", style="quiet")
        to_search = self._to_search_text()
        bar = ProgressBar(
            total=self._study.budget_s,
            completed=max(0.0, spent_s),
            width=max(10, min(40, width - 22 - len(to_search))),
            complete_style="key",
            finished_style="key",
        )
        grid.add_row("left", clock_text(self._study.budget_s - spent_s), bar, to_search)
        return grid

    def _to_search_text(self) -> str:
        """Returns the time left for the search, "3:52 to search"; "" once it is over."""
        outlook, reported_s = self._outlook or (None, 0.0)
        if outlook is None or outlook.search_s is None:
            return ""
        return f"{clock_text(outlook.search_s - (self._budget_clock() - reported_s))} to search"

    def _trials_row(self) -> Table | None:
        """Returns the row with the number of trials left, for a budget in trials only; None if there is nothing to show."""
        if self._outlook is None or not (text := left_text(self._outlook[0])):
            return None
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=7, style="quiet")
        grid.add_row("left", text.removesuffix(" left"))
        return grid


def _header(study: StudyRecord) -> Group:
    name = Text.assemble((study.name, "name"), f"  {study.title}", no_wrap=True, overflow="ellipsis")
    facts = Text(
        f"{machine_text(study.machine)}  ·  budget {budget_text(study)}", style="quiet", no_wrap=True, overflow="ellipsis"
    )
    aims = [Text(f"objective {aims_text(study.objective, study.terms)}", style="quiet")] if has_aims(study) else []
    return Group(name, facts, *aims, Text())


def _elapsed_text(seconds: float) -> str:
    return f"{max(0, int(seconds))} s" if seconds < 60 else clock_text(seconds)  # decimals would flicker
