"""Defines the records of trials and studies: plain values, written to and read from JSON.

The study folder is the source of truth; MLflow, reports and `show` are made from these records.

    runs/<study>/study.json             StudyRecord: command, space, machine, fingerprint (written before the first trial)
    runs/<study>/trials/0007/asked.json TrialRequest (written before the trial starts)
    runs/<study>/trials/0007/trial.json TrialRecord (written when the trial is over; absent until then)
    runs/<study>/summary.json           Summary (rewritten at most every few seconds, see study/writing.py)
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.shapes import ANY, check, flag, interval, knob_value, moment, number, text, whole_number

SCHEMA = 1

KnobValue = bool | int | float | str
Knobs = dict[str, KnobValue]

THROUGHPUT, TIME, ENERGY, COST = "throughput", "time_for_samples", "energy_per_sample", "cost_per_epoch"
OBJECTIVES = (THROUGHPUT, TIME, ENERGY, COST)
START_PHASES = ("spawn", "import", "init", "first_batch")  # of protocol.PHASES, those before the first step


def objective_names(objective: str | list[str]) -> tuple[str, ...]:
    """Returns the objectives of a study, the deciding one first."""
    return (objective,) if isinstance(objective, str) else tuple(objective)


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
    infeasible = "infeasible"  # measured, and found to break one of `constraints.*`

    @property
    def may_win(self) -> bool:
        """Whether a trial with this outcome may be chosen without another measurement."""
        return self is Outcome.ok

    @property
    def has_value(self) -> bool:
        """Whether a trial with this outcome has a usable rate."""
        return self in (Outcome.ok, Outcome.raced, Outcome.unsteady, Outcome.infeasible)

    @property
    def is_memory(self) -> bool:
        """Whether a trial with this outcome ran out of memory. A retry would be pointless."""
        return self in (Outcome.device_oom, Outcome.host_oom)

    @property
    def is_no_answer(self) -> bool:
        """Whether this outcome says nothing about the configuration, which may then be proposed again."""
        return self in (Outcome.disturbed, Outcome.interrupted)


class Tier(enum.StrEnum):
    """How much a knob changes besides speed; each tier includes the tiers before it."""

    exact = "exact"
    numerics = "numerics"
    training = "training"

    @property
    def rank(self) -> int:
        """Position in the order exact < numerics < training."""
        return _RANKS[self]


_RANKS = {tier: place for place, tier in enumerate(Tier)}


class Kind(enum.StrEnum):
    """Why a trial was run."""

    baseline = "baseline"
    search = "search"
    attribution = "attribution"
    final = "final"
    parity = "parity"
    explain = "explain"  # a pass of `autotune explain`, which only observes; it never has a value
    check = "check"  # one of a pair of trials that try a finding's remedy; it is used for nothing else


# Evidence keys of checks that ran a changed program. They say nothing about how the study's own program would run.
SKIPPED = "skipped"  # stages and functions that were skipped
FIXED = "fixed"  # True: it ran the program given to `explain --fixed`
# `why` of the finals' trials: some are for choosing the winner, the others give the rates that are reported.
CHOOSING, REPORTED = "finals, choosing", "finals, reported"
AGAIN = "again"  # `origin` of a search trial that measures a configuration once more, because its first rate is in doubt


@dataclass(kw_only=True)
class TrialRequest:
    """What a trial is to measure, written before it starts. It is all that remains if autotune is killed during the trial.

    Attributes:
        number, kind, knobs, changed, tier, why, origin, repeats, round, started_at: as in TrialRecord.
    """

    number: int
    kind: Kind
    knobs: Knobs
    changed: Knobs
    tier: Tier = Tier.exact
    why: str = ""
    origin: str = ""
    repeats: int | None = None
    round: int | None = None
    started_at: float = 0.0
    schema: int = SCHEMA

    def shared(self) -> dict[str, Any]:
        """Returns the fields that a request shares with the trial's record, except `started_at`."""
        names = ("number", "kind", "knobs", "changed", "tier", "why", "origin", "repeats", "round")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, raw: Any) -> TrialRequest:
        """Returns the request that `dataclasses.asdict` turned into plain values.

        Raises:
            ValueError: another schema, or not a request.
        """
        values = _fields(cls, raw, "trial request", _TRIAL_SHAPE)
        return cls(**{**values, "kind": Kind(values["kind"]), "tier": Tier(values.get("tier", Tier.exact))})


@dataclass(kw_only=True, slots=True)  # slots, because a study may keep thousands of records
class TrialRecord:
    """One finished trial.

    Attributes:
        number: its place in the study and its folder's name; 0 is the baseline.
        kind: why it was run.
        repeats: number of the trial whose configuration is measured again, explained or changed (kind check), or whose losses
            are checked (kind parity); None for a first measurement.
        round: round of the finals or of the attribution that the trial belongs to; None outside both.
        knobs: full configuration, the baseline's observed values included.
        changed: the part of `knobs` that differs from the baseline; what the harness was asked to apply.
        why: one line on why this configuration was tried.
        origin: what proposed it: "earlier" (an earlier study), "expert", "single KEY" (one change to the best), "sampler NAME",
            "late" (the best with a costly value, without needless changes, or limited to a lower tier), "again" (the
            configuration's only rate is in doubt); "attribution N" for the ablation of trial N; for kind explain, the pass; for
            kind check, the cause that it tries to remove; "" for the baseline and the finals.
        outcome: how it ended.
        reason: one line on why it ended like that; "" for a plain ok.
        evidence: log tail, exit status, exception: {"exit_code", "signal", "error", "log_tail", ...}.
        value: throughput in samples (or `unit`) per second over all ranks; None without a measurement.
        ci: 95 % interval of `value` from block means, within one process; None if there is none.
        why_no_ci: why there is no `ci`; "" if there is one, or if there is no value.
        unit: "samples", "tokens" or "steps".
        tier: highest tier among the changed knobs.
        started_at: seconds since the epoch.
        seconds: wall time from launch until the last process was gone.
        start: "fresh" for a new interpreter; "warm" for a fork of a process that had imported torch.
        spared_s: seconds that the warm start saved over a fresh one.
        phases_s: rank 0's seconds in each phase.
        peak_memory_bytes: the largest of all ranks.
        device_rate, loader_rate: D and L, the rates of the step alone and of the loader alone, per second over all ranks; None
            when unknown.
        data_wait_frac: share of the window that rank 0 waited for input.
        regime: "shared" if loader workers and steps share CPU cores, "separate" if not, "" without workers.
        metrics: further numbers for the tracker, name -> value (NVML power, energy, utilisation, step times).
        knob_reports: knob key -> {"status", "reason", "observed"}, from the rank with the worst status. In addition to the
            requested knobs, it has "loader.multiprocessing_context" if the harness had to fork workers that the trial added.
        objectives: objective -> value in its own unit (see trials/objective.py), for the study's objectives; unknown ones are
            absent.
        scores: objective -> its value as a score (more is better); None when unknown. The deciding objective is first. Empty
            in records that hold throughput only.
        violations: key of a violated constraint -> share by which the trial exceeds its limit.
        losses: losses of the first optimizer steps, at most 64, averaged over ranks; None in place of a loss that is not
            finite; [] if no loss was seen.
        ranks: summary of several ranks together and one by one, see `ranks.joined`; {} for a single rank.
        slot, host: name of the slot that the trial ran on, and of its machine; "" if it had the machine to itself.
        neighbours: largest number of other trials that ran at the same time.
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
    origin: str = ""
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    value: float | None = None
    ci: tuple[float, float] | None = None
    why_no_ci: str = ""
    unit: str = "samples"
    started_at: float = 0.0
    seconds: float = 0.0
    start: str = "fresh"
    spared_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    device_rate: float | None = None
    loader_rate: float | None = None
    data_wait_frac: float | None = None
    regime: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    knob_reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    objectives: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float | None] = field(default_factory=dict)
    violations: dict[str, float] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    ranks: dict[str, Any] = field(default_factory=dict)
    slot: str = ""
    host: str = ""
    neighbours: int = 0
    schema: int = SCHEMA

    @property
    def score(self) -> float | None:
        """What the study maximises; None without a measurement. It has no unit, since scores are only compared with scores."""
        if self.value is None:
            return None
        return next(iter(self.scores.values())) if self.scores else self.value

    @property
    def is_of_program(self) -> bool:
        """Whether it ran the study's program as it is: nothing was skipped, and it was not a fixed version of the program."""
        return not (self.evidence.get(SKIPPED) or self.evidence.get(FIXED))

    @property
    def start_s(self) -> float:
        """Seconds of the phases before the first step."""
        return sum(self.phases_s.get(phase, 0.0) for phase in START_PHASES)

    @property
    def attempt_s(self) -> float:
        """Wall time of the last attempt: what this trial costs if nothing goes wrong."""
        return self.seconds - float(self.evidence.get("earlier_attempt", {}).get("seconds", 0.0))

    @property
    def fresh_s(self) -> float:
        """Wall time the last attempt would have taken if started fresh, as all repeated measurements are."""
        return self.attempt_s + self.spared_s

    def as_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values. They are not copied, so callers must not change them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, raw: Any) -> TrialRecord:
        """Returns the record that `as_json` wrote.

        Raises:
            ValueError: another schema, or not a record.
        """
        values = _fields(cls, raw, "trial record", _TRIAL_SHAPE)
        values["outcome"], values["kind"] = Outcome(raw.get("outcome")), Kind(raw.get("kind"))
        values["tier"] = Tier(raw.get("tier"))
        values["ci"] = None if raw.get("ci") is None else (float(raw["ci"][0]), float(raw["ci"][1]))
        values["metrics"] = {name: value for name, value in raw.get("metrics", {}).items() if value is not None}
        return cls(**values)


@dataclass(kw_only=True)
class StudyRecord:
    """What a study measures and where; written before its first trial.

    Attributes:
        name: the study's name and folder.
        base: the requested name, which several studies may share.
        sequence: place among the studies of the runs folder, from 1. Unlike the clock, it never goes back.
        title: what is tuned, for people: the recipe's name or the command line.
        command: argument list of the program, placeholders unfilled.
        placeholders: knob -> value in the baseline, for the knobs that are arguments in the command line.
        is_recipe: whether a built-in recipe is tuned.
        cwd: working directory of the program.
        objective: what is optimised: one of OBJECTIVES, or a list of several with the deciding one first.
        terms: inputs of the objective and the constraints: {"samples", "epoch_samples", "price_per_hour", "constraints":
            {key: limit}}; inputs that were not given are absent.
        fingerprint: hash of `identity`; only results with the same fingerprint are compared.
        identity: what makes results comparable, by name: machine, program, objective, space (see trials/identity.py).
        asked: knob key -> domain that the user asked for, as written by `Domain.as_json`, or {"auto": true}.
        space: knob key -> domain, for the knobs that are searched. Until the baseline has run, it is the same as `asked`.
        pinned: knobs the user fixed, for the baseline too.
        machine: host and device facts.
        versions: autotune, python, torch (of the program), optuna, ...
        detected: what the baseline found in the program: {"optimizers", "modules", "world_size", "num_replicas" (GPUs of
            DataParallel), "batches_per_step"}, as in RankResult.detected; {} before it has run and in records of earlier
            versions.
        started_at: seconds since the epoch.
        budget_s: wall-time budget; None for unlimited.
        budget_trials: trial budget; None for unlimited.
        spent_s: wall time that earlier runs of this study took, before it was resumed.
        search_ended: why the search ended; "" while it may go on.
        settings: configuration key -> value that is not the default, for keys that affect what is measured (recipe, device,
            windows).
        recording: for a study that records a table of measurements instead of searching: how many configurations it measures,
            how often each, and `launch.warm`, {"configurations", "repeats", "warm"}; {} for a study that searches.
        target: the training loaders as the baseline found them, `RankResult.target`; None before that, or without a DataLoader.
        verifies: what the study verifies instead of searching: a `Verify`; {} for a study that searches.
        warm_start: what the study reuses from earlier studies, see `study/earlier_studies.py`; {} for nothing.
        noise: variation from process to process as earlier studies measured it, a `stats.Noise`; {} without any.
        slots: how many search trials run in parallel, and the calibration: {"num", "ratio" (rate beside other trials
            divided by rate alone), "ci", "num_pairs", "why_one"}. If only some slots were calibrated, "num_sampled" is
            their number. Further keys let a resumed study keep the calibration: "allows" (whether trials may run in parallel),
            "trial" (number of the trial whose configuration was measured), "hosts" (of the slots), "took_s" (seconds). {} on a
            machine with one slot.
    """

    name: str
    title: str
    command: list[str]
    cwd: str
    base: str = ""
    sequence: int = 0
    placeholders: Knobs = field(default_factory=dict)
    is_recipe: bool = False
    objective: str | list[str] = "throughput"
    terms: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    space: dict[str, Any] = field(default_factory=dict)
    pinned: Knobs = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    detected: dict[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
    budget_s: float | None = None
    budget_trials: int | None = None
    spent_s: float = 0.0
    search_ended: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    verifies: dict[str, Any] = field(default_factory=dict)
    recording: dict[str, Any] = field(default_factory=dict)
    warm_start: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, Any] = field(default_factory=dict)
    slots: dict[str, Any] = field(default_factory=dict)
    target: list[dict[str, Any]] | None = None
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: Any) -> StudyRecord:
        """Returns the record that `as_json` wrote.

        Raises:
            ValueError: another schema, or not a record.
        """
        return cls(**_fields(cls, raw, "study record", _STUDY_SHAPE))


# What a document's fields must be, by name.
_NUMBER_OR_NULL, _WHOLE_OR_NULL = (None, number), (None, whole_number)
_MAPPING: dict[str, Any] = {}
_KNOBS, _NUMBERS = {ANY: knob_value}, {ANY: _NUMBER_OR_NULL}
_TRIAL_SHAPE: Mapping[str, Any] = {
    **dict.fromkeys(("number", "neighbours"), whole_number),
    **dict.fromkeys(("round", "repeats"), _WHOLE_OR_NULL),
    **dict.fromkeys(("started_at", "seconds", "spared_s"), number),
    **dict.fromkeys(("value", "device_rate", "loader_rate", "data_wait_frac", "peak_memory_bytes"), _NUMBER_OR_NULL),
    **dict.fromkeys(("why", "origin", "why_no_ci", "reason", "unit", "regime", "start", "slot", "host"), text),
    **dict.fromkeys(("knobs", "changed"), _KNOBS),
    **dict.fromkeys(("objectives", "scores", "violations"), _NUMBERS), "ranks": _MAPPING,
    "evidence": {"error?": {}, "hang?": {}, "earlier_attempt?": {"seconds?": number}},
    "knob_reports": {ANY: (None, {"status?": text, "reason?": text})},
    "phases_s": {ANY: number}, "metrics": {ANY: _NUMBER_OR_NULL}, "ci": (None, interval), "losses": [_NUMBER_OR_NULL],
}  # fmt: skip
_STUDY_SHAPE: Mapping[str, Any] = {
    **dict.fromkeys(("name", "title", "cwd", "base", "search_ended"), text),
    "started_at": moment, "spent_s": number,
    **dict.fromkeys(
        ("placeholders", "identity", "asked", "space", "pinned", "machine", "versions", "detected", "terms", "settings",
         "verifies", "recording", "warm_start", "noise"),
        _MAPPING,
    ),
    "slots": {"ratio?": _NUMBER_OR_NULL, "why_one?": text, "allows?": flag, "trial?": _WHOLE_OR_NULL, "hosts?": [text],
              "took_s?": number},
    "command": [text], "sequence": whole_number, "is_recipe": flag, "target": (None, [{}]),
    "budget_s": _NUMBER_OR_NULL, "budget_trials": _WHOLE_OR_NULL,
}  # fmt: skip


def _fields(cls: type[Any], raw: Any, what: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a document's values for the fields of a dataclass. Optional fields that it lacks are left out.

    Raises:
        ValueError: another schema, a required field is missing, or a value has the wrong type.
    """
    check_schema(raw, what)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {name: value for name, value in raw.items() if name in fields}
    for name, f in fields.items():
        is_required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if is_required and name not in values:
            raise ValueError(f"{what} without {name!r}")
    for name in values.keys() & shape.keys():
        check(values[name], shape[name], f"{what}'s {name}")
    return values


def check_schema(raw: Any, what: str, *, reads: int = SCHEMA) -> None:
    """Checks that a document is a mapping that this version can read.

    Args:
        raw: the document.
        what: what it is, for the message.
        reads: the schema that this version reads.

    Raises:
        NewerVersion: a newer version of autotune wrote it.
        ValueError: it is not a mapping, or has another schema.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{what} expected, got {raw!r:.80}")
    found = raw.get("schema")
    if found != reads:
        kind = NewerVersion if type(found) is int and found > reads else ValueError
        raise kind(f"{what} of schema {found!r}, this version reads {reads}")


class NewerVersion(ValueError):
    """A document has a schema that only a newer version of autotune can read."""


def last_round(records: Iterable[TrialRecord], kind: Kind | None = None) -> int:
    """Returns the number of the latest round among trials of a kind, or of any kind if `kind` is None; 0 without rounds."""
    return max((record.round or 0 for record in records if kind in (None, record.kind)), default=0)


# The document of `autotune show --json`, kept as a plain dict because it is an interface; summaries.py describes it.
Summary = dict[str, Any]
