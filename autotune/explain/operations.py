"""Reads what the passes of a configuration wrote, makes tables of it, and picks what the rules of `findings` need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.explain.evidence import Operations
from autotune.explain.tables import MAX_DISTORTION, Tables, explained, write_tables
from autotune.harness.explain.documents import INPUT, LINES, MEMORY, TRACE, Lines, Memory


@dataclass(kw_only=True)
class Documents:
    """What the passes of one configuration found, by rank.

    Attributes:
        lines, memory: documents of these passes; [] if the pass did not run or nothing that it wrote can be read.
        operations: what the traces say of operators; [] without a trace.
        notes: sentences on what is missing and why, and on what the passes could not find out.
    """

    lines: list[Lines] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    operations: list[Operations] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_documents(folders: Mapping[str, Path], mask: Callable[[str], str]) -> Documents:
    """Reads what the passes of a configuration wrote; writes its tables as CSV and JSON if there is a trace.

    If something cannot be read, a sentence in the notes says so; no zeros are made up for it.

    Args:
        folders: pass -> folder of the trial that ran it; the trace's folder gets the tables.
        mask: removes secrets from texts.
    """
    made = explained(list(folders.values()), mask=mask)
    read = {which: [found[rank] for rank in sorted(found)] for which, found in made.passes.by_pass.items()}
    notes = []
    for which in folders:
        notes += [f"{which}: not known, {reason}" for reason in made.passes.absent.get(which, ())]
        notes += [f"{which}: {note}" for document in read[which][:1] for note in document.notes]
    operations = []
    if TRACE in folders:
        write_tables(made.tables, folders[TRACE])
        operations = _operations(made.tables)
    return Documents(lines=read[LINES], memory=read[MEMORY], operations=operations, notes=notes)


def _operations(tables: Tables) -> list[Operations]:
    return [
        operations_of(tables.rows("operators", rank), tables.rows("breakdown", rank), tables.distortion.get(rank))
        for rank in sorted({int(row["rank"]) for row in tables.rows("operators")})
    ]


def operations_of(
    operators: Sequence[Mapping[str, Any]], breakdown: Sequence[Mapping[str, Any]], distortion: float | None
) -> Operations:
    """Returns what the tables of one rank say of operators.

    Args:
        operators: rows with "operator", "count", "host_self_s" and "device_self_s" a step.
        breakdown: rows with "category" and "seconds" a step.
        distortion: seconds of a profiled step divided by those of a plain one; None if unknown.
    """
    has_device = any(row.get("device_self_s") for row in operators)
    key = "device_self_s" if has_device else "host_self_s"
    names = ("operator", "kind", "phase", "count", "bound", "roofline_frac")
    listed = [{**{name: row.get(name) for name in names}, "seconds": row.get(key) or 0.0} for row in operators]
    compute_s = math.fsum(float(row["seconds"]) for row in breakdown if "compute" in str(row["category"]))
    return Operations(
        count=math.fsum(float(row["count"]) for row in operators if row.get("phase") != INPUT),
        by_operator=sorted(listed, key=lambda row: -row["seconds"]),
        busy_s=compute_s if has_device else None,
        is_distorted=distortion is not None and distortion > MAX_DISTORTION,
    )
