"""Compares the ranks of a program: which one the others wait for, in which phase it is slower, and what communication costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.explain.breakdown import COLLECTIVES, INPUT_WAIT, Breakdown
from autotune.explain.host_tables import step_s
from autotune.explain.passes import Passes
from autotune.explain.table import Row, Table
from autotune.harness.explain.documents import BACKWARD, STEP_PHASES

COLUMNS = {
    "rank": "rank of the process", "step_s": "seconds of a step",
    "exposed_communication_s": "seconds a step that it waits in collectives", "own_s": "step_s without that wait",
    "input_s": "seconds a step that it waits for its next batch",
    **{f"{phase}_s": f"host seconds per step in {phase}" for phase in STEP_PHASES[1:]},
    "behind_s": "own_s more than the fastest rank's", "is_slowest": "whether the others wait for it",
    "collective_s": "seconds a step in collectives, exposed or not", "gradient_bytes": "that it reduces in a step",
    "measured_by": "lines (no profiler) or trace",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Skew:
    """How unevenly the ranks work.

    Attributes:
        slowest: the rank that the others wait for.
        lost_s: seconds a step that the fastest rank waits for the slowest. Making the ranks equally fast saves at most this.
        lost_frac: `lost_s` relative to the step.
        phase: the one of STEP_PHASES in which the slowest is furthest behind the median of the others; "" if unknown.
        phase_s: seconds a step that the slowest is behind in this phase.
    """

    slowest: int
    lost_s: float
    lost_frac: float
    phase: str = ""
    phase_s: float = 0.0


def ranks_table(passes: Passes, breakdowns: Mapping[int, Breakdown]) -> Table:
    """Returns a table with a row for each rank.

    In a synchronous program a step takes equally long on all ranks. They differ in how long each waits for the others.

    Args:
        passes: documents by rank.
        breakdowns: rank -> breakdown of its trace.
    """
    rows = [_row(passes, breakdowns, rank) for rank in sorted({*passes.lines, *breakdowns})]
    owns = [row["own_s"] for row in rows if row["own_s"] is not None]
    for row in rows:
        row["behind_s"] = row["own_s"] - min(owns) if row["own_s"] is not None else None
        row["is_slowest"] = row["own_s"] is not None and row["own_s"] == max(owns) and len(owns) > 1
    notes = []
    if rows and all(row["own_s"] is None for row in rows):
        notes.append("the wait for other ranks is not known, so neither is which rank is slow")
    missing = [rank for rank in range(passes.world_size) if rank not in {row["rank"] for row in rows}]
    notes += [f"rank {rank}: nothing was written" for rank in missing]
    return Table(
        name="ranks",
        title="Ranks",
        columns=COLUMNS,
        rows=[{name: row[name] for name in COLUMNS} for row in rows],
        notes=notes,
    )


def skew_of(table: Table) -> Skew | None:
    """Returns how unevenly the ranks of `ranks_table` work; None with fewer than two comparable ranks."""
    rows = [row for row in table.rows if row["own_s"] is not None]
    if len(rows) < 2 or len({row["measured_by"] for row in rows}) > 1:
        return None
    slowest = max(rows, key=lambda row: float(row["own_s"]))
    others = [row for row in rows if row is not slowest]
    behind = {phase: _behind(slowest, others, f"{phase}_s") for phase in STEP_PHASES}
    behind[BACKWARD] -= _behind(slowest, others, "exposed_communication_s")  # the wait is part of the backward pass
    phase = max(behind, key=lambda name: behind[name])
    lost_s = float(slowest["behind_s"])
    is_known = behind[phase] > 0
    return Skew(
        slowest=slowest["rank"],
        lost_s=lost_s,
        lost_frac=lost_s / slowest["step_s"] if slowest["step_s"] else 0.0,
        phase=phase if is_known else "",
        phase_s=behind[phase] if is_known else 0.0,
    )


def _behind(slowest: Row, others: list[Row], column: str) -> float:
    values = [row[column] for row in others if row[column] is not None]
    return float(slowest[column] - statistics.median(values)) if values and slowest[column] is not None else 0.0


def _row(passes: Passes, breakdowns: Mapping[int, Breakdown], rank: int) -> Row:
    lines, found, memory = passes.lines.get(rank), breakdowns.get(rank), passes.memory.get(rank)
    exposed = lines.communication.get("exposed_s") if lines else None
    from_lines = lines is not None and (exposed is not None or found is None)
    if lines is not None and from_lines:
        seconds, input_s, phases = step_s(lines), lines.wait_s, lines.phases_s
    elif found is not None:
        seconds, exposed, input_s = found.step_s, found.seconds[COLLECTIVES], found.seconds[INPUT_WAIT]
        phases = lines.phases_s if lines else {}
    gradient_bytes = (lines.communication.get("gradient_bytes") if lines else None) or (
        (memory.gradients or memory.parameters) if memory else None
    )
    return {
        "rank": rank,
        "step_s": seconds,
        "exposed_communication_s": exposed,
        "own_s": seconds - exposed if exposed is not None else None,
        "input_s": input_s,
        **{f"{phase}_s": phases.get(phase) for phase in STEP_PHASES[1:]},
        "collective_s": found.collective_s if found else None,
        "gradient_bytes": gradient_bytes,
        "measured_by": "lines" if from_lines else "trace",
    }
