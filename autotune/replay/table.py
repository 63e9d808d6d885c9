"""Reads and writes tables: all measurements of a recording in one small file, to be committed and replayed anywhere.

    table.jsonl.gz   first line the header, then one line per measurement, in the order they were made

A table does not identify its machine: it names no host, user or path. A program's message is kept as one line without folders.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.documents import write_bytes
from autotune.errors import BadInput
from autotune.plain_json import from_json
from autotune.plain_text import plain, shortened
from autotune.records import Knobs, NewerVersion, Outcome, check_schema

SCHEMA = 1  # version of the format
MAX_BYTES = 2**28  # maximum size of an unpacked table; a small file may unpack to more than fits into memory
SUFFIX = ".jsonl.gz"
FORMAT = "autotune table"

Key = frozenset[tuple[str, Any]]


def key_of(changed: Knobs) -> Key:
    """Returns a configuration's identity: its changes to the baseline. True and 1 are different values, unlike in Python."""
    return frozenset((name, (type(value).__name__, value)) for name, value in changed.items())


@dataclass(kw_only=True)
class Measurement:
    """One recorded trial.

    Attributes:
        number: its place in the recording.
        round: which repeat of its configuration it is, from 1.
        changed: the configuration's changes to the baseline.
        outcome, reason, value, ci: as in TrialRecord.
        is_disturbed: whether a disturbance of the machine did not end, so that a disturbed measurement was kept.
        seconds: wall time of the last attempt, from launch until the last process was gone.
        metrics: as in TrialRecord.
        ended: how the processes ended; a dict with the keys "exit_code", "signal", "cause", "phase" and "evidence", as in
            launchers.Ended.
        results: results of the trial's ranks, as in RankResult, without raw steps.
    """

    number: int
    round: int
    changed: Knobs
    outcome: Outcome
    seconds: float
    reason: str = ""
    is_disturbed: bool = False
    value: float | None = None
    ci: tuple[float, float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """Key of its configuration."""
        return key_of(self.changed)


@dataclass(kw_only=True)
class Table:
    """A recording.

    Attributes:
        workload: what was trained, in a word or two: the recording's name.
        machine: facts of the machine: `machine.host_facts()` without the machine's name.
        versions: versions of autotune, torch, Python and Optuna.
        asked: a dict from knob key to the domain that the user gave, as `Domain.as_json` or {"auto": true}.
        pinned: knobs fixed for every trial.
        placeholders: {knob: its value in the baseline} for the knobs that are arguments of the command.
        is_recipe: whether a built-in recipe was recorded.
        settings: {configuration key: value} for all keys that affect what is measured and differ from the default; no paths.
        objective: as in StudyRecord.
        unit: what is counted: "samples", "tokens", "steps".
        baseline: the baseline's configuration, without knobs that have no effect in it.
        reference: the baseline's values, including the values of inactive knobs.
        space: a dict from knob key to the recorded domain.
        memory_bytes: memory that a trial could fill: the user's limit if there was one, else all memory; None if unknown.
        repeats: intended number of measurements of each configuration.
        is_whole: whether every configuration of the space was to be recorded.
        recorded_on: day the recording began, YYYY-MM-DD.
        measurements: in the order they were made.
    """

    workload: str
    machine: dict[str, Any]
    versions: dict[str, str]
    asked: dict[str, Any]
    pinned: Knobs
    placeholders: Knobs
    is_recipe: bool
    settings: dict[str, Any]
    objective: str | list[str]
    unit: str
    baseline: Knobs
    reference: Knobs
    space: dict[str, Any]
    memory_bytes: int | None
    repeats: int
    is_whole: bool
    recorded_on: str
    measurements: list[Measurement] = field(default_factory=list)

    def by_configuration(self) -> dict[Key, list[Measurement]]:
        """Returns the measurements of each configuration, in the order of their rounds."""
        found: dict[Key, list[Measurement]] = defaultdict(list)
        for one in sorted(self.measurements, key=lambda measurement: measurement.round):
            found[one.key].append(one)
        return dict(found)


def write(table: Table, path: Path) -> None:
    """Writes a table; equal tables give the same bytes.

    Raises:
        OSError: the file cannot be written.
    """
    header = {field.name: getattr(table, field.name) for field in dataclasses.fields(table) if field.name != "measurements"}
    lines = [{"format": FORMAT, "schema": SCHEMA, **header}, *(_line(one) for one in table.measurements)]
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, gzip.compress(text.encode(), compresslevel=9, mtime=0), mode=0o666)


_NONE = object()
_USUAL: dict[str, Any] = {  # defaults, which are not written
    "changed": {}, "reason": "", "is_disturbed": False, "value": None, "ci": None, "metrics": {}, "ended": {}, "results": [],
}  # fmt: skip


def _line(one: Measurement) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(one).items() if value != _USUAL.get(name, _NONE)}


def read(path: Path) -> Table:
    """Returns the table that `write` wrote.

    Raises:
        BadInput: the file does not exist, or is not a table of this version.
    """
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        text = content.decode()
        lines = [json.loads(line, parse_constant=_no_number, parse_float=_finite) for line in text.splitlines()]
        return _table(lines)
    except NewerVersion as error:
        raise BadInput(f"TABLE: made by a newer version of autotune, got {str(path)!r} ({error}). Update autotune.") from error
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, RecursionError) as error:
        said = getattr(error, "strerror", None) or str(error)
        why = shortened(" ".join(plain(said).split()), 200) or type(error).__name__
        raise BadInput(
            f"TABLE: cannot be read, got {str(path)!r} ({why}). Give a file that `autotune record` wrote."
        ) from error


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _finite(word: str) -> float:
    if math.isfinite(value := float(word)):
        return value
    raise ValueError(f"{word} is too large")


def _table(lines: Sequence[Any]) -> Table:
    header = dict(lines[0]) if lines and isinstance(lines[0], dict) else {}
    if header.pop("format", None) != FORMAT:
        raise ValueError("not a table")
    check_schema(header, "table", reads=SCHEMA)
    table = from_json({name: value for name, value in header.items() if name not in ("schema", "measurements")}, Table)
    for number, line in enumerate(lines[1:], 2):
        if not isinstance(line, dict) or "outcome" not in line:
            raise ValueError(f"line {number} is not a measurement")
        table.measurements.append(from_json({"changed": {}, **line}, Measurement))
    return table
