"""Makes a table from a recording's folder.

A recording is a study that measures many configurations of a program several times each. A table is one file with all these
measurements, from which searches are replayed on any machine. It describes the hardware, but leaves out what identifies the
machine (host name, ids of GPUs and processes, folders) and what a replay does not need.
"""

from __future__ import annotations

import dataclasses
import math
import re
from datetime import UTC, datetime
from typing import Any

from autotune.config.checks import memory_limit_bytes
from autotune.errors import BadInput
from autotune.failures import classify
from autotune.harness import protocol
from autotune.harness.protocol import KnobReport, RankResult
from autotune.knobs.base import HostContext
from autotune.launchers.rank_results import RankResults
from autotune.machine import host_context
from autotune.plain_json import mapped
from autotune.plain_text import shortened
from autotune.ranks import pace
from autotune.records import Kind, Outcome, StudyRecord, TrialRecord
from autotune.replay.results import ended_of, facts_of
from autotune.replay.table import Measurement, Table
from autotune.run_dir import StudyFolder
from autotune.space import ResolvedSpace, SearchSpace, domain_from_json, resolve
from autotune.study.design import configurations
from autotune.trials.health import ACCEPTED
from autotune.trials.not_finite import NOT_FINITE

DIGITS = 6  # significant digits of every number: far finer than clocks measure
PATH = re.compile(r"(?:~|\.{1,2})?(?:/[\w.+@-]+)+/([\w.+@-]+)")  # only the last part of a path is kept
MACHINE = ("cpu_model", "num_cores", "num_cpus", "memory_bytes", "isa", "has_compiler", "gpus", "topology")
FACTS = (
    "torch", "device", "device_name", "isa", "has_compiler", "compute_capability", "device_memory_bytes", "num_numa_nodes",
    "num_local_ranks", "num_nodes", "collectives", "nccl",
)  # fmt: skip
GPU = ("name", "memory_bytes", "compute_capability", "driver")
RESULT = (
    "rank", "world_size", "status", "phases_s", "unit", "throughput_per_s", "regime", "device_rate_per_s", "loader_rate_per_s",
    "data_wait_frac", "memory", "loss", "scaling", "compiled", "communication",
)  # fmt: skip
EVIDENCE = (NOT_FINITE, "num_steps", "is_harness_seen", "oom_kills", "deadline", "shut_out")
VERSIONS = ("autotune", "torch", "python", "optuna")
SETTINGS_WITH_PATHS = ("data.root", "program.python", "model.factory", "data.factory", "train.step")


def table_of(folder: StudyFolder) -> Table:
    """Returns the table of a recording.

    Raises:
        BadInput: the folder cannot be read, or the baseline was not measured.
    """
    try:
        about, records = folder.read_study(), folder.read_trials()
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder.path}: cannot be exported as a table, got {error}.") from error
    answered = [one for one in records if one.kind in (Kind.baseline, Kind.search) and not one.outcome.is_no_answer]
    if not answered or answered[0].number != 0:
        raise BadInput(f"{folder.path}: cannot be exported as a table, the baseline was not measured.")
    results = {record.number: _results(folder, record) for record in answered}
    if not results[0]:
        raise BadInput(f"{folder.path}: cannot be exported as a table, the baseline's results are missing.")
    space, here = _space(about, results[0][0])
    return Table(
        workload=about.base.removeprefix("record-"),
        machine=_machine(about.machine),
        versions={name: about.versions[name] for name in VERSIONS if name in about.versions},
        asked=about.asked,
        pinned=about.pinned,
        placeholders=about.placeholders,
        is_recipe=about.is_recipe,
        settings={key: value for key, value in about.settings.items() if key not in SETTINGS_WITH_PATHS},
        objective=about.objective,
        unit=answered[0].unit,
        baseline=answered[0].knobs,
        reference=space.reference,
        space=space.as_json(),
        memory_bytes=_memory_bytes(about, results[0][0]),
        repeats=int(about.recording["repeats"]),
        is_whole=configurations(space, here, most=int(about.recording["configurations"]), seed=0)[1],
        recorded_on=datetime.fromtimestamp(about.started_at, UTC).strftime("%Y-%m-%d"),
        measurements=[_measurement(record, results[record.number]) for record in answered],
    )


def _results(folder: StudyFolder, record: TrialRecord) -> list[RankResult]:
    path = folder.trial_path(record.number)
    try:
        found = RankResults(path, protocol.read_spec(str(path / protocol.SPEC_FILE)))
    except (OSError, ValueError, TypeError, KeyError):
        return []
    found.collect()
    return [found.by_rank[rank] for rank in sorted(found.by_rank)]


def _space(about: StudyRecord, first: RankResult) -> tuple[ResolvedSpace, HostContext]:
    """Returns the space that was recorded, and the context in which the knobs' rules were evaluated."""
    here = host_context(about.machine, first, is_recipe=about.is_recipe)
    asked = {key: domain_from_json(domain) for key, domain in about.asked.items()}
    is_held = about.settings.get("train.global_batch") is not None
    return resolve(SearchSpace(domains=asked, pinned=about.pinned, is_held=is_held), here, passed=about.placeholders), here


def _memory_bytes(about: StudyRecord, first: RankResult) -> int | None:
    """Returns the memory that a trial could fill: the user's cap, else the capacity seen by the baseline, else host memory."""
    limit = about.settings.get("device.memory_limit")
    known = first.memory.get("capacity_bytes") or first.facts.get("device_memory_bytes") or about.machine.get("memory_bytes")
    return memory_limit_bytes(limit, int(known) if known else None) or (int(known) if known else None)


def _measurement(record: TrialRecord, results: list[RankResult]) -> Measurement:
    made = Measurement(
        number=record.number,
        round=record.round or 1,
        changed=record.changed,
        outcome=record.outcome,
        reason="" if record.outcome is Outcome.ok else plain(record.reason),
        is_disturbed=bool(record.evidence.get(ACCEPTED)),
        value=_rounded(record.value),
        ci=_rounded(record.ci),
        seconds=_rounded(record.attempt_s),
        metrics=_rounded(record.metrics),
        ended={
            "exit_code": record.evidence.get("exit_code"),
            "signal": record.evidence.get("signal"),
            "cause": record.evidence.get("cause", "exit"),
            "phase": record.evidence.get("phase", "steady"),
            "evidence": {name: record.evidence[name] for name in EVIDENCE if record.evidence.get(name)},
        },
        results=[_result(_with_window(result, results[0]), is_first=record.number == 0) for result in results],
    )
    return made if _is_classified_alike(made) else _with_plain_ending(made)


def _with_window(result: RankResult, first: RankResult) -> RankResult:
    """Returns a rank's result, with a window added if it has none.

    The rate of a rank without a window is computed from its raw steps. A table has no raw steps, so this function computes the
    rate, over the steps of rank 0's window. The added window is a copy of rank 0's window, scaled to this rate.
    """
    window, own = first.window, None if result.window else pace(result, first)
    if window is None or own is None or not own.samples or not window.rate_per_s:
        return result
    rate_per_s = own.samples / own.step_s
    made = dataclasses.replace(
        window,
        seconds=window.steps * own.step_s,
        samples=window.steps * own.samples,
        rate_per_s=rate_per_s,
        block_rates_per_s=[rate * rate_per_s / window.rate_per_s for rate in window.block_rates_per_s],
    )
    return dataclasses.replace(result, window=made, throughput_per_s=rate_per_s)


def _is_classified_alike(made: Measurement) -> bool:
    """Whether `classify` returns the recorded outcome for what is exported; True for outcomes that `classify` never returns."""
    if made.outcome in (Outcome.infeasible, Outcome.parity):
        return True
    return classify(facts_of(ended_of(made, trial=0, nonce="")))[0] is made.outcome


def _with_plain_ending(made: Measurement) -> Measurement:
    """Changes a measurement's ending so that it yields the same outcome without the log, which is not exported."""
    kinds = {Outcome.device_oom: "torch.OutOfMemoryError", Outcome.host_oom: "MemoryError"}
    if made.outcome in (Outcome.crash, Outcome.timeout):
        crashed = {"cause": "exit", "signal": made.ended.get("signal") or "SIGABRT"}
        made.ended |= crashed if made.outcome is Outcome.crash else {"cause": "deadline"}
        made.results = []
        return made
    made.ended |= {"cause": "result", "signal": None}
    error = {"type": kinds.get(made.outcome, "RuntimeError"), "message": made.reason, "traceback": ""}
    made.results = [{**(made.results[0] if made.results else {"rank": 0, "world_size": 1}), "status": "failed", "error": error}]
    return made


def _result(result: RankResult, *, is_first: bool) -> dict[str, Any]:
    """Returns a rank's result without raw steps, paths and pids. Facts of the program are kept only if `is_first`."""
    num_samples = (result.detected.get("loader") or {}).get("num_samples")
    loader = {"loader": {"num_samples": num_samples}} if num_samples else {}
    kept: dict[str, Any] = {
        **{name: getattr(result, name) for name in RESULT},
        "error": _error(result.error),
        "window": vars(result.window) if result.window else None,
        "knobs": {key: _known(report) for key, report in result.knobs.items()},
        "detected": {"num_steps": result.detected.get("num_steps"), **loader},
    }
    if is_first:
        kept["facts"] = {name: result.facts[name] for name in FACTS if result.facts.get(name) is not None}
        kept["observed"], kept["applicability"] = result.observed, result.applicability
    kept = mapped(kept, lambda value: plain(value) if isinstance(value, str) else value)
    return {name: value for name, value in _rounded(kept).items() if value not in (None, "", {}, [])}


def _known(report: KnobReport) -> dict[str, Any]:
    return {name: value for name, value in vars(report).items() if value not in ("", None)}


def _error(error: dict[str, str] | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {name: plain(error[name]) for name in ("type", "message", "worker") if error.get(name)}


def _machine(facts: dict[str, Any]) -> dict[str, Any]:
    kept = {name: facts[name] for name in MACHINE if facts.get(name) is not None}
    kept["gpus"] = [{name: gpu[name] for name in GPU if gpu.get(name) is not None} for gpu in facts.get("gpus") or []]
    return kept


def plain(text: str) -> str:
    """Returns a text as one line, with paths reduced to their last part."""
    return shortened(PATH.sub(r"\1", " ".join(text.split())), 400)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return type(value)(_rounded(entry) for entry in value) if isinstance(value, list | tuple) else value
