"""Manages the Optuna study: writes its journal and passes the outcome of each trial to Optuna.

The trials' records are the source of truth, and the journal is made from them. A resumed search starts a new journal and adds
every finished trial. So no trial is missing, duplicated or running forever, no matter when the last search was killed.

Optuna 5's samplers ignore trials with the state FAIL, so they would propose a failed configuration again and again. Therefore a
failed trial is passed as COMPLETE, with the worst score seen and a violated constraint, and samplers avoid it. A trial that has
a rate but cannot win is passed in the same way, because optuna-dashboard ignores constraints and calls the trial with the
highest score the best.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Container, Generator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from autotune.harness.protocol import APPLIED
from autotune.records import Knobs, Outcome, TrialRecord
from autotune.run_dir import when_there_is_room
from autotune.search.rates import MACHINE, MEASURED, Machine
from autotune.search.samplers import Distributions

NUMBER_ATTRIBUTE = "trial"  # user attribute: number of the trial in the study folder
MEMORY, WORKS = "memory", "works"  # constraints that mark why a configuration has no rate
STEADY = "steady"  # constraint that an unsteady trial violates, so that no viewer of the journal calls it the best trial
PARITY = "parity"  # constraint that a trial violates if loss parity has ruled it out although it has a rate
MIN_MEMORY_VIOLATION = 0.01
UNKNOWN_MEMORY_VIOLATION = 0.1  # violation if the peak is unknown, for example because the process was killed for memory


@dataclass(frozen=True, kw_only=True)
class Told:
    """What Optuna learns about a trial.

    Attributes:
        state: COMPLETE, or FAIL if the configuration may be proposed again.
        values: a score for each objective; None for FAIL.
        constraints: {name: violation}; a constraint is violated if its violation is above 0.
    """

    state: TrialState
    values: list[float] | None = None
    constraints: dict[str, float] = field(default_factory=dict)


def told(record: TrialRecord, *, worst: Sequence[float], memory_capacity_bytes: int | None = None) -> Told:
    """Returns what Optuna learns about a finished trial.

    Args:
        record: the trial.
        worst: lowest score of any trial of the study, for each objective.
        memory_capacity_bytes: memory that each process of the trial may fill; None when unknown.
    """
    values = scores_of(record)
    if (record.outcome.has_value or record.outcome is Outcome.parity) and None not in values:
        broken = {key: violation for key, violation in record.violations.items() if violation > 0}
        broken |= {STEADY: 1.0} if record.outcome is Outcome.unsteady else {}
        broken |= {PARITY: 1.0} if record.outcome is Outcome.parity else {}
        own = [value for value in values if value is not None]
        return Told(state=TrialState.COMPLETE, values=list(worst) or own if broken else own, constraints=broken)
    if record.outcome.is_no_answer:
        return Told(state=TrialState.FAIL)
    if record.outcome.is_memory:
        violation = _memory_violation(record.peak_memory_bytes, memory_capacity_bytes)
        return Told(state=TrialState.COMPLETE, values=list(worst), constraints={MEMORY: violation})
    return Told(state=TrialState.COMPLETE, values=list(worst), constraints={WORKS: 1.0})  # with FAIL it would be proposed again


def scores_of(record: TrialRecord) -> list[float | None]:
    """Returns a trial's score for each objective, the deciding one first."""
    return list(record.scores.values()) or [record.value]


def measured(record: TrialRecord, metrics: Collection[str] = ()) -> dict[str, Any]:
    """Returns facts about a trial that a sampler needs, but Optuna itself does not. The journal stores them.

    Args:
        record: the trial.
        metrics: names of metrics that the study limits.
    """
    found = {
        "outcome": str(record.outcome),
        "score": scores_of(record)[0],
        "rate": record.value,
        "device_rate": record.device_rate,
        "loader_rate": record.loader_rate,
        "regime": record.regime,
        "peak_memory_bytes": record.peak_memory_bytes,
        "seconds": record.attempt_s,
        "to_blame": None if record.outcome.has_value else sorted(may_be_to_blame(record)),
    }
    limited = {name: record.metrics[name] for name in metrics if record.metrics.get(name)}
    more = {"metrics": limited, "violated": list(record.violations)}
    return found | {key: value for key, value in more.items() if value}


def may_be_to_blame(record: TrialRecord) -> Knobs:
    """Returns the changes that may have made a trial fail: those named in its error or knob reports, else all of them."""
    named = {(record.evidence.get("error") or {}).get("knob"), *record.evidence.get("barred_for", ())}
    if record.outcome is Outcome.invalid:
        named |= {key for key, report in record.knob_reports.items() if report.get("status") != APPLIED}
    found = {key: value for key, value in record.changed.items() if key in named}
    return found or dict(record.changed)


def _memory_violation(peak_bytes: int | None, capacity_bytes: int | None) -> float:
    if not peak_bytes or not capacity_bytes:
        return UNKNOWN_MEMORY_VIOLATION
    return max(MIN_MEMORY_VIOLATION, peak_bytes / capacity_bytes - 1)


class _Journal(JournalFileBackend):
    """Optuna's journal file. Waits a little if the disk is full, and leaves no half-written line.

    Optuna writes 20 records per trial and reads each of them back. This class reads the file only if another process
    has also written to it. It does not call fsync, because the journal can be rebuilt from the trials' records.

    Args:
        file: the journal; it must be empty.

    Attributes:
        on_change: called with a trial's id before a change of this trial is written.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file
        self.on_change: Callable[[int], None] = lambda _: None
        self._unread: list[dict[str, Any]] = []
        self._size_bytes = 0  # size of the file after our last write; another size means that another process wrote
        self._has_others = False  # whether another process has written to it

    @property
    def is_ours(self) -> bool:
        """Whether no other process has written to the journal so far."""
        return not self._has_others and os.stat(self._file).st_size == self._size_bytes

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yields the records from number `log_number_from` on."""
        found, self._unread = self._unread, []
        size_bytes = os.stat(self._file).st_size
        if size_bytes == self._size_bytes:
            yield from found
        else:
            self._size_bytes, self._has_others = size_bytes, True
            yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends Optuna's records.

        Raises:
            OSError: the file cannot be written.
        """
        for log in logs:
            if "trial_id" in log:
                self.on_change(log["trial_id"])
        lines = [json.dumps(log, separators=(",", ":")) for log in logs]
        content = "".join(f"{line}\n" for line in lines).encode()
        when_there_is_room(lambda: self._append(content))
        self._size_bytes += len(content)
        self._unread += logs

    def _append(self, content: bytes) -> None:
        self._lock.acquire()
        try:
            size_bytes = os.stat(self._file).st_size
            try:
                with open(self._file, "ab") as file:
                    file.write(content)
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self._file, size_bytes)
                raise
        finally:
            try:
                self._lock.release()
            except FileNotFoundError as error:
                # `release` renames the lock's file and deletes it. If Ctrl-C interrupts it just before or after, its clean-up
                # looks for the renamed file and fails.
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise error.__context__ from None
                raise


class _Storage(JournalStorage):
    """Optuna's storage. To list trials, it looks up only those that have changed since they were last listed.

    Optuna lists the trials several times for each proposal. If another process has written to the journal, Optuna's own method
    is used. Otherwise the journal holds a single study, in which a trial's number is its id.

    Args:
        journal: the journal.
    """

    def __init__(self, journal: _Journal) -> None:
        super().__init__(journal)
        self._journal = journal
        journal.on_change = self._note_change
        # For each combination of states, its trials by id, and the ids of the trials that have changed since they were listed.
        self._listed: dict[tuple[TrialState, ...], tuple[dict[int, FrozenTrial], set[int]]] = {}
        self._distributions: dict[Any, dict[str, BaseDistribution]] = {}  # the distinct distributions of all finished trials

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """See `BaseStorage.create_new_trial`."""
        trial_id = super().create_new_trial(study_id, template_trial)
        self._note_change(trial_id)
        return self._shared(trial_id)

    def set_trial_state_values(self, trial_id: int, *args: Any, **more: Any) -> bool:
        """See `BaseStorage.set_trial_state_values`."""
        is_set = super().set_trial_state_values(trial_id, *args, **more)
        self._shared(trial_id)
        return is_set

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """See `BaseStorage.get_all_trials`."""
        if deepcopy or not isinstance(states, tuple) or not self._journal.is_ours:
            return super().get_all_trials(study_id, deepcopy, states)
        if states not in self._listed:
            self._listed[states] = {trial.number: trial for trial in super().get_all_trials(study_id, False, states)}, set()
        trials, changed = self._listed[states]
        for trial in map(self.get_trial, sorted(changed)):
            if trial.state not in states:
                trials.pop(trial.number, None)
                continue
            is_in_order = not trials or trial.number in trials or trial.number > next(reversed(trials))
            trials[trial.number] = trial
            if not is_in_order:  # a later trial got one of these states before this one did
                trials = dict(sorted(trials.items()))
        self._listed[states] = trials, set()
        return list(trials.values())

    def _shared(self, trial_id: int) -> int:
        """Saves memory: lets a finished trial share equal distributions and names with earlier trials. Returns its id."""
        trial = self.get_trial(trial_id)
        if not trial.state.is_finished():
            return trial_id
        found = self._distributions.setdefault(tuple(trial.distributions.items()), trial.distributions)
        trial.distributions = found
        trial.params = {key: one.to_external_repr(one.to_internal_repr(trial.params[key])) for key, one in found.items()}
        trial.system_attrs = {sys.intern(key): value for key, value in trial.system_attrs.items()}
        return trial_id

    def _note_change(self, trial_id: int) -> None:
        for _, changed in self._listed.values():
            changed.add(trial_id)


def begin_study(
    journal: Path | None,
    name: str,
    sampler: optuna.samplers.BaseSampler,
    *,
    scores: Sequence[str] = ("score",),
    machine: Machine | None = None,
) -> optuna.Study:
    """Returns a new Optuna study in a journal file, replacing an existing journal.

    Args:
        journal: the journal file; None to keep the study in memory.
        name: the study's name in the journal.
        sampler: proposes configurations.
        scores: names of a trial's scores, as a viewer of the journal shows them.
        machine: facts about the machine, for the sampler; None if there are none.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # Optuna's log lines would break the live table
    storage: BaseStorage | None = None
    if journal is not None:
        for file in (journal, *journal.parent.glob(f"{journal.name}.lock*")):  # a killed writer leaves its lock behind
            file.unlink(missing_ok=True)
        journal.touch(mode=0o600)
        storage = _Storage(_Journal(journal))
    study = optuna.create_study(storage=storage, study_name=name, sampler=sampler, directions=["maximize"] * len(scores))
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        study.set_metric_names(list(scores))
    if machine:
        study.set_user_attr(MACHINE, vars(machine))
    return study


def tell(
    study: optuna.Study, trial: optuna.trial.Trial, record: TrialRecord, *, metrics: Collection[str] = (), **limits: Any
) -> None:
    """Reports a proposed trial to Optuna. `record` is from this trial, or from an earlier one of the same configuration.

    `metrics` are passed to `measured`, and `limits` to `told`.
    """
    answer = told(record, **limits)
    trial.set_user_attr(NUMBER_ATTRIBUTE, record.number)
    trial.set_user_attr(MEASURED, measured(record, metrics))
    for name, violation in _all_violations(answer).items():
        trial.set_constraint(name, violation)
    study.tell(trial, answer.values, state=answer.state)


def _all_violations(answer: Told) -> dict[str, float]:
    """Returns the violation of every constraint, 0 if it holds: Optuna's GP needs the same constraints in all trials."""
    if answer.values is None:
        return {}
    own = (MEMORY, WORKS, STEADY)
    limits = [violation for name, violation in answer.constraints.items() if name not in own]
    kept = {name: answer.constraints.get(name, 0.0) for name in own}
    return {**kept, "limits": max(limits, default=0.0)}


def add_known(
    study: optuna.Study, record: TrialRecord, distributions: Distributions, *, metrics: Collection[str] = (), **limits: Any
) -> None:
    """Adds a trial that Optuna did not propose: the baseline, an initial configuration or a single change.

    Args:
        study: the study.
        record: the finished trial.
        distributions: distributions of the searched knobs. Knobs without a distribution, and values outside the knob's
            distribution, are left out.
        metrics: names of metrics that the study limits.
        **limits: `worst` and `memory_capacity_bytes` of `told`.
    """
    answer = told(record, **limits)
    params = _within(record.knobs, distributions)
    trial = optuna.trial.create_trial(
        state=answer.state,
        values=answer.values,
        params=params,
        distributions={key: distributions[key] for key in params},
        user_attrs={NUMBER_ATTRIBUTE: record.number, MEASURED: measured(record, metrics)},
        constraints=_all_violations(answer),
    )
    if record.started_at:
        trial.datetime_start = datetime.fromtimestamp(record.started_at)  # local time, as in Optuna's own trials
        trial.datetime_complete = datetime.fromtimestamp(record.started_at + record.seconds)
    study.add_trial(trial)


def _within(knobs: Knobs, distributions: Distributions) -> Knobs:
    return {key: value for key, value in knobs.items() if key in distributions and _holds(distributions[key], value)}


def _holds(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return bool(distribution._contains(distribution.to_internal_repr(value)))
    except (ValueError, TypeError):
        return False
