"""What is known of a trial and a study once measured: plain values, written to and read from JSON.

The study folder is the truth; MLflow, reports and `show` are made from these records.

    runs/<study>/study.json             StudyRecord: command, space, machine, fingerprint (written before the first trial)
    runs/<study>/trials/0007/trial.json TrialRecord (written when the trial is over; absent = it is not)
    runs/<study>/summary.json           Summary (rewritten after every trial)
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1

KnobValue = bool | int | float | str
Knobs = dict[str, KnobValue]


class Outcome(enum.StrEnum):
    """How a trial ended. Every trial has exactly one."""

    ok = "ok"
    raced = "raced"
    unsteady = "unsteady"
    device_oom = "device_oom"
    host_oom = "host_oom"
    timeout = "timeout"
    crash = "crash"
    error = "error"
    nonfinite = "nonfinite"
    parity = "parity"
    invalid = "invalid"
    disturbed = "disturbed"
    interrupted = "interrupted"

    @property
    def may_win(self) -> bool:
        """Whether a trial that ended like this may be chosen without another measurement."""
        return self is Outcome.ok

    @property
    def has_value(self) -> bool:
        """Whether a trial that ended like this carries a usable number."""
        return self in (Outcome.ok, Outcome.raced, Outcome.unsteady)


class Tier(enum.StrEnum):
    """How much a knob changes beside speed; ordered: each includes the ones before it."""

    exact = "exact"
    numerics = "numerics"
    training = "training"

    @property
    def rank(self) -> int:
        """Position in the order exact < numerics < training."""
        return list(Tier).index(self)


class Kind(enum.StrEnum):
    """Why a trial was run."""

    baseline = "baseline"
    search = "search"
    final = "final"


@dataclass(kw_only=True)
class TrialRecord:
    """One finished trial.

    Attributes:
        number: its place in the study, from 0, the baseline; also its folder's name.
        kind: why it was run.
        repeats: number of the trial whose configuration this one measures again; None for a first measurement.
        round: round of the finals it belongs to; None outside the finals.
        knobs: full configuration, the baseline's observed values included.
        changed: the part of `knobs` that differs from the baseline: what the harness was asked to do.
        why: one line on why this configuration was tried.
        outcome: how it ended.
        reason: one line on why it ended like that; "" for a plain ok.
        evidence: log tail, exit status, exception: {"exit_code", "signal", "error", "log_tail", ...}.
        value: objective, samples (or `unit`) per second over all ranks; None without a measurement.
        ci: 95 % interval of `value` from block means; None when it could not be had.
        unit: "samples" or "steps".
        tier: highest tier among the changed knobs.
        started_at: seconds since the epoch.
        seconds: wall time from launch to the last process gone.
        phases_s: seconds by phase, rank 0.
        peak_memory_bytes: largest over ranks.
        device_rate, loader_rate: D and L, per second over all ranks; None when unknown.
        data_wait_frac: share of the window rank 0 waited for input.
        metrics: further numbers for the tracker, name -> value (NVML power, energy, utilisation, step times).
        knob_reports: knob key -> {"status", "reason", "observed"} (rank 0, the worst rank for statuses).
        sampler_number: Optuna's number of this trial; None for trials Optuna does not know.
    """

    number: int
    kind: Kind
    knobs: Knobs
    changed: Knobs
    outcome: Outcome
    tier: Tier = Tier.exact
    repeats: int | None = None
    round: int | None = None
    why: str = ""
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    value: float | None = None
    ci: tuple[float, float] | None = None
    unit: str = "samples"
    started_at: float = 0.0
    seconds: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    device_rate: float | None = None
    loader_rate: float | None = None
    data_wait_frac: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    knob_reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    sampler_number: int | None = None
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> TrialRecord:
        """Returns the record that `as_json` wrote.

        Raises:
            ValueError: another schema, or not a record.
        """
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"trial record of schema {raw.get('schema')!r}, this version reads {SCHEMA}")
        known = {f.name for f in dataclasses.fields(cls)}
        values = {name: value for name, value in raw.items() if name in known}
        values["outcome"], values["kind"] = Outcome(raw["outcome"]), Kind(raw["kind"])
        values["tier"] = Tier(raw["tier"])
        values["ci"] = None if raw["ci"] is None else (float(raw["ci"][0]), float(raw["ci"][1]))
        return cls(**values)


@dataclass(kw_only=True)
class StudyRecord:
    """What a study is about; written once, before its first trial.

    Attributes:
        name: the study's name and folder.
        title: what is tuned, for people: the recipe's name or the command line.
        command: argument list of the program, placeholders unfilled.
        cwd: working directory of the program.
        objective: "throughput".
        fingerprint: hash over program, space, objective and machine: results are compared within one only.
        space: knob key -> domain as written by `Domain.as_json`, for the knobs that are searched.
        pinned: knobs the user fixed; they hold for the baseline too.
        machine: host and device facts.
        versions: autotune, python, torch (of the program), optuna, ...
        started_at: seconds since the epoch.
        budget_s: wall-time budget; None for unlimited.
        budget_trials: trial budget; None for unlimited.
    """

    name: str
    title: str
    command: list[str]
    cwd: str
    objective: str = "throughput"
    fingerprint: str = ""
    space: dict[str, Any] = field(default_factory=dict)
    pinned: Knobs = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    started_at: float = 0.0
    budget_s: float | None = None
    budget_trials: int | None = None
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> StudyRecord:
        """Returns the record that `as_json` wrote.

        Raises:
            ValueError: another schema.
        """
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"study record of schema {raw.get('schema')!r}, this version reads {SCHEMA}")
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in known})


# Summary is the document of `autotune show --json`, kept as a plain dict because it is an interface:
# {"schema", "study", "title", "status": "complete|running|interrupted|failed", "reason", "objective", "unit", "machine": {...},
#  "baseline": {"trial", "value", "ci": [lo, hi] | null, "knobs"},
#  "best": {"trial", "value", "ci", "overrides": {knob: value}, "knobs"} | null,
#  "best_by_tier": {tier: {"trial", "value", "ci", "overrides"}},
#  "speedup": {"ratio", "ci": [lo, hi] | null, "verdict": "faster|same|ambiguous", "reason"} | null,
#  "attribution": [{"knob", "from", "to", "ratio", "ci"}], "diagnosis": [{"finding", "evidence", "advice"}],
#  "counts": {outcome: n}, "seconds": {"total", "measuring", "starting", "compiling", "lost"},
#  "fingerprint", "versions", "started_at", "budget_s",
#  "files": {"left": [{"name", "bytes", "trial"}], "restored": [{"path", "trials"}]},
#  "trials": [{"number", "kind", "outcome", "reason", "why", "knobs", "changed", "tier", "value", "ci", "seconds", "phases_s",
#              "peak_memory_bytes", "device_rate", "loader_rate", "data_wait_frac", "round", "repeats"}]}
Summary = dict[str, Any]
