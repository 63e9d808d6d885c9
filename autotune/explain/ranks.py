"""Compares the ranks of a program: which one the others wait for, in which phase it is slower, and what communication costs."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.explain.breakdown import COLLECTIVES, INPUT_WAIT, Breakdown
from autotune.explain.host_tables import step_s
from autotune.explain.passes import Passes
from autotune.explain.table import Row, Table
from autotune.harness.explain.documents import INPUT, STEP_PHASES

COLUMNS = {
    "rank": "rank of the process", "step_s": "seconds of a step",
    "exposed_communication_s": "seconds per step that it waits in collectives", "own_s": "step_s minus exposed_communication_s",
    "input_s": "seconds per step that it waits for its next batch",
    **{f"{phase}_s": f"host seconds per step in {phase}" for phase in STEP_PHASES[1:]},
    "behind_s": "own_s minus own_s of the fastest rank", "is_slowest": "whether the others wait for it",
    "collective_s": "seconds per step in collectives, even while the device also computes",
    "gradient_bytes": "bytes of gradients reduced per step",
    "measured_by": "lines (no profiler) or trace",
}  # fmt: skip


def ranks_table(passes: Passes, breakdowns: Mapping[int, Breakdown]) -> Table:
    """Returns a table with a row for each rank.

    In a synchronous program, a step takes equally long on all ranks. The ranks differ in how long they wait for the others.
    """
    rows = [_row(passes, breakdowns, rank) for rank in sorted({*passes.lines, *breakdowns})]
    owns = [row["own_s"] for row in rows if row["own_s"] is not None]
    for row in rows:
        row["behind_s"] = row["own_s"] - min(owns) if row["own_s"] is not None else None
        row["is_slowest"] = row["own_s"] is not None and row["own_s"] == max(owns) and len(owns) > 1
    notes = []
    if rows and all(row["own_s"] is None for row in rows):
        notes.append("the wait for other ranks is unknown, so it is also unknown which rank is slow")
    missing = [rank for rank in range(passes.world_size) if rank not in {row["rank"] for row in rows}]
    notes += [f"rank {rank}: nothing was written" for rank in missing]
    rows = [{name: row[name] for name in COLUMNS} for row in rows]
    return Table(name="ranks", title="Ranks", columns=COLUMNS, rows=rows, notes=notes)


def _row(passes: Passes, breakdowns: Mapping[int, Breakdown], rank: int) -> Row:
    lines, found, memory = passes.lines.get(rank), breakdowns.get(rank), passes.memory.get(rank)
    exposed = lines.communication.get("exposed_s") if lines else None
    from_lines = lines is not None and (exposed is not None or found is None)
    if lines is not None and from_lines:
        seconds, input_s, phases = step_s(lines), lines.phases_s.get(INPUT), lines.phases_s
    elif found is not None:
        seconds, exposed, input_s = found.step_s, found.seconds[COLLECTIVES], found.seconds[INPUT_WAIT]
        phases = lines.phases_s if lines else {}
    gradient_bytes = (lines.communication.get("gradient_bytes") if lines else None) or (
        (memory.gradients or memory.parameters or None) if memory else None
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
