"""Computes a study's objectives from a trial's numbers, and checks its constraints.

Every objective has a value in its own unit, and a score. A higher score is always better, so a ratio of scores above 1 always
means an improvement. For N samples, T(N) = start + compile + N / throughput; the time between epochs is not measured.

    objective          value                                         score
    throughput         samples per second                            the same
    time_for_samples   T(study.samples), seconds                     study.samples / T(study.samples)
    energy_per_sample  joules per sample, of all devices             samples per joule
    cost_per_epoch     machine.price_per_hour x hours of an epoch    samples per unit of currency

The compile time is that of an empty cache, as in the user's first run: the study's own cache would make it look shorter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune import stats
from autotune.config.schema import StudyConfig
from autotune.errors import BadInput
from autotune.harness.protocol import RankResult
from autotune.quantities import number_text
from autotune.records import COST, ENERGY, THROUGHPUT, TIME, Kind, Knobs, KnobValue, Outcome, TrialRecord, objective_names

REPEATED = (Kind.final, Kind.explain, Kind.check)  # kinds of trials whose code was compiled by earlier trials
COMPILE_KEY, COMPILE_OFF = "compile.mode", "off"
HOUR_S = 3600.0
UNCHECKED = "could not be checked"  # in the reason of a trial for which a constraint's value is unknown
HEADROOM, POWER, STEP = "constraints.memory_free_frac", "constraints.max_power_w", "constraints.max_step_p95_s"
METRICS = {POWER: "gpu.power_w", STEP: "step_p95_s"}  # the metric of a trial that a constraint limits
RATE_ALONE = frozenset({THROUGHPUT, COST})  # objectives that depend only on throughput, so that a slow trial may end early


@dataclass(kw_only=True)
class Goal:
    """The objectives and constraints of a study.

    Attributes:
        names: objectives, the deciding one first.
        samples: length of the real training; None if not given, or if no objective needs it.
        epoch_samples: length of an epoch; None when unknown.
        price_per_hour: price of an hour of the machine; None if not given.
        limits: {key of a constraint: its limit}.
        capacity_bytes: total memory, to which `constraints.memory_free_frac` refers; None when unknown.
    """

    names: tuple[str, ...] = (THROUGHPUT,)
    samples: float | None = None
    epoch_samples: float | None = None
    price_per_hour: float | None = None
    limits: dict[str, float] = dataclasses.field(default_factory=dict)
    capacity_bytes: int | None = None

    @classmethod
    def of(cls, config: StudyConfig) -> Goal:
        """Returns the configured goal, without the facts that only the baseline provides."""
        names, samples = objective_names(config.objective), config.study.samples
        keep = config.constraints
        limits = {HEADROOM: keep.memory_free_frac, POWER: keep.max_power_w, STEP: keep.max_step_p95_s}
        return cls(
            names=names,
            samples=samples if TIME in names else None,
            epoch_samples=config.train.samples_per_epoch or (None if TIME in names else samples),
            price_per_hour=config.machine.price_per_hour,
            limits={key: float(limit) for key, limit in limits.items() if limit is not None},
        )

    @property
    def follows_rate(self) -> bool:
        """Whether throughput alone decides, so that a trial may be stopped early because of its rate."""
        return set(self.names) <= RATE_ALONE

    @property
    def limited_metrics(self) -> dict[str, float]:
        """{metric of a trial: its limit}, for the constraints that limit a metric."""
        return {METRICS[key]: limit for key, limit in self.limits.items() if key in METRICS}

    @property
    def terms(self) -> dict[str, Any]:
        """The inputs of objective and constraints, for study.json. Inputs that are not given or not needed are left out."""
        found = {
            "samples": self.samples,
            "epoch_samples": self.epoch_samples if COST in self.names else None,
            "price_per_hour": self.price_per_hour,
            "constraints": self.limits,
        }
        return {name: value for name, value in found.items() if value}

    def learn(self, results: Sequence[RankResult], *, capacity_bytes: int | None) -> None:
        """Adds the facts that the baseline provides."""
        self.capacity_bytes = capacity_bytes
        length = (results[0].detected.get("loader") or {}).get("num_samples") if results else None
        self.epoch_samples = self.epoch_samples or length

    def judge(self, record: TrialRecord, results: Sequence[RankResult], *, cold_compile_s: float = 0.0) -> None:
        """Writes objectives, scores and violations into a trial's record.

        A trial cannot win if it violates a constraint, or if a constraint could not be checked.

        Args:
            record: the trial with its numbers.
            results: results of the trial's ranks.
            cold_compile_s: seconds that compiling with this configuration's compile mode took with an empty cache.
        """
        if record.value is None:
            return
        values = {name: self._value(name, record, len(results), cold_compile_s) for name in self.names}
        record.objectives = {name: value for name, value in values.items() if value}
        record.scores = {name: self._score(name, value) for name, value in values.items()}
        self._constrain(record, results)

    def check_baseline(self, record: TrialRecord) -> None:
        """Checks that the baseline measured everything that the objectives and constraints need.

        Raises:
            BadInput: something cannot be measured for this program on this machine; the error says what.
        """
        problems = []
        if record.unit != "samples" and (counting := [name for name in self.names if name in (TIME, COST)]):
            problems.append(
                f"objective: samples cannot be counted in this program, whose rate is in {record.unit}/s, got {counting[0]}. "
                f"Give objective={THROUGHPUT}, which counts {record.unit}."
            )
        elif COST in self.names and self.epoch_samples is None:
            do = f"Leave {COST} out." if TIME in self.names else "Give study.samples=N, the samples of an epoch."
            problems.append(
                f"study.samples: objective={COST} needs the length of an epoch, which the program's loader does not show, got "
                f"no value. {do}"
            )
        elif unknown := [name for name in self.names if name not in record.objectives]:
            problems.append(f"objective: could not be measured in the baseline, got {unknown[0]}. Give another objective.")
        unread = [key for key in self.limits if self._used(key, record, None) is None]
        problems += [
            f"{key}: this limit cannot be checked, because what it limits could not be measured in the baseline, "
            f"got {self.limits[key]:g}. Leave the limit out."
            for key in unread
        ]
        if problems:
            raise BadInput(problems)

    def _value(self, name: str, record: TrialRecord, num_ranks: int, cold_compile_s: float) -> float | None:
        rate = record.value
        if not rate:
            return None
        if name == THROUGHPUT:
            return rate
        if name == TIME:
            return None if self.samples is None else fixed_s(record, cold_compile_s) + self.samples / rate
        if name == ENERGY:
            return _joules_per_sample(record, num_ranks)
        if self.epoch_samples is None or self.price_per_hour is None:
            return None
        return self.price_per_hour * self.epoch_samples / rate / HOUR_S

    def _score(self, name: str, value: float | None) -> float | None:
        if not value or name == THROUGHPUT:
            return value
        samples = {TIME: self.samples, COST: self.epoch_samples}.get(name)
        return (samples or 1) / value

    def _constrain(self, record: TrialRecord, results: Sequence[RankResult]) -> None:
        said = []
        for key, limit in self.limits.items():
            used = self._used(key, record, results)
            allowed = 1 - limit if key == HEADROOM else limit
            if used is None:
                said.append(f"{key} {UNCHECKED}")
            elif used > allowed:
                record.violations[key] = used / allowed - 1
                said.append(_broken(key, used, limit))
        # Even an unsteady baseline must not win if it violates a constraint.
        if said and (record.outcome is Outcome.ok or record.kind is Kind.baseline):
            record.outcome = Outcome.infeasible
        if said:
            record.reason = "; ".join([record.reason, *said] if record.reason else said)

    def _used(self, key: str, record: TrialRecord, results: Sequence[RankResult] | None) -> float | None:
        """Returns a trial's value of the quantity that a constraint limits; None when unknown."""
        if key in METRICS:
            return record.metrics.get(METRICS[key])
        peak_bytes = _memory_bytes(results) if results else record.peak_memory_bytes
        return peak_bytes / self.capacity_bytes if peak_bytes and self.capacity_bytes else None


def _memory_bytes(results: Sequence[RankResult]) -> int:
    """Returns the peak use, in bytes, of the GPU or host whose memory a trial used most.

    Memory that an allocator has reserved is not available to other programs, even if it is not in use, so it counts. Ranks on
    a CPU share the memory of their host, unless each process has a limit of its own. Ranks on one GPU share its memory.
    """
    used: dict[tuple[str, str], int] = {}
    for result in results:
        memory = result.memory
        is_shared = memory.get("kind") == "cpu" and not memory.get("capacity_bytes")
        gpus = ",".join(result.facts.get("device_uuids") or ())
        place = (result.host, "" if is_shared else gpus or str(result.rank))
        peak_bytes = max(int(memory.get(name) or 0) for name in ("peak_bytes", "peak_reserved_bytes"))
        used[place] = used.get(place, 0) + peak_bytes
    return max(used.values())


def fixed_s(record: TrialRecord, cold_compile_s: float = 0.0) -> float:
    """Returns the seconds from the start of a run until it trains at its full rate, with an empty compile cache.

    Args:
        record: one measurement of the configuration.
        cold_compile_s: seconds that compiling with this compile mode took in another trial; used if longer than in `record`.
    """
    # The user's own run does not start warm, so it also takes the seconds that a warm start spared.
    return record.start_s + record.spared_s + max(record.phases_s.get("compile", 0.0), cold_compile_s)


class ColdCompiles:
    """The longest compile phase with each compile mode, in trials of all kinds except those in REPEATED.

    The first trial with a mode compiles everything. Later trials use the study's cache, which the user's first run does not
    have.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._longest_s: dict[KnobValue, float] = {}
        for record in records:
            self.add(record)

    def add(self, record: TrialRecord) -> None:
        """Adds a finished trial."""
        mode = record.knobs.get(COMPILE_KEY, COMPILE_OFF)
        if mode != COMPILE_OFF and record.kind not in REPEATED and record.outcome.has_value:
            self._longest_s[mode] = max(self._longest_s.get(mode, 0.0), record.phases_s.get("compile", 0.0))

    def seconds(self, knobs: Knobs) -> float:
        """Returns the longest compile phase with a configuration's compile mode; 0 if none is known."""
        return self._longest_s.get(knobs.get(COMPILE_KEY, COMPILE_OFF), 0.0)


def means(measured: Sequence[TrialRecord]) -> dict[str, Any]:
    """Returns the means of one configuration's measurements, as in the summary.

    Args:
        measured: the measurement from the search, or the measurements that the finals report.

    Returns:
        value, ci: throughput and its interval; objectives, objectives_ci: each objective's value and interval by name. A
        single measurement has an interval for its rate only.
    """
    if len(measured) == 1:
        (one,) = measured
        intervals = {name: one.ci if name == THROUGHPUT else None for name in one.objectives}
        return {"value": one.value, "ci": one.ci, "objectives": dict(one.objectives), "objectives_ci": intervals}
    value, ci = stats.log_mean_interval([record.value for record in measured if record.value])
    names = [name for name in measured[0].objectives if all(name in record.objectives for record in measured)]
    found = {name: stats.log_mean_interval([record.objectives[name] for record in measured]) for name in names}
    return {
        "value": value,
        "ci": ci,
        "objectives": {name: mean for name, (mean, _) in found.items()},
        "objectives_ci": {name: interval for name, (_, interval) in found.items()},
    }


def _joules_per_sample(record: TrialRecord, num_ranks: int) -> float | None:
    """Returns the energy per sample over all devices, assuming that each draws the mean power of the watched devices."""
    # This metric is one rank's power divided by its rate. If all ranks have the same power and rate, it is also the energy per
    # sample of all ranks together.
    per_rank_j = record.metrics.get("gpu.energy_per_sample_j")
    if per_rank_j is not None:
        return per_rank_j
    power_w = record.metrics.get("gpu.power_w")
    return power_w * max(1, num_ranks) / record.value if power_w and record.value else None


def _broken(key: str, used: float, limit: float) -> str:
    if key == HEADROOM:
        return f"{key}: leaves {max(0.0, 1 - used):.1%} of the memory free, wanted {limit:.1%}"
    unit = "W" if key == POWER else "s"
    return f"{key}: {number_text(used)} {unit}, allowed {limit:g} {unit}"
