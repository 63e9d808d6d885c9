"""Makes the tables of a trial's passes, and picks from them what the rules of `findings` look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.explain.evidence import Operations
from autotune.explain.tables import explained, write_tables

MAX_DISTORTION = 1.5  # a profiled step over a plain one; if it is slower still, shares say little of the plain program


def tables(folders: Sequence[Path], place: Path, mask: Callable[[str], str]) -> list[Operations]:
    """Writes the tables of the passes of a configuration as CSV and JSON, and returns what they say of operators, by rank.

    Args:
        folders: of the trials that ran the passes.
        place: folder that gets the tables.
        mask: removes secrets from texts.
    """
    made = explained(folders, mask=mask).tables
    write_tables(made, place)
    ranks = sorted({int(row["rank"]) for row in made.rows("operators")})
    return [
        operations_of(made.rows("operators", rank), made.rows("breakdown", rank), made.distortion.get(rank)) for rank in ranks
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
    listed = [{"operator": row["operator"], "count": row["count"], "seconds": row.get(key) or 0.0} for row in operators]
    compute_s = math.fsum(float(row["seconds"]) for row in breakdown if "compute" in str(row["category"]))
    return Operations(
        count=math.fsum(float(row["count"]) for row in operators),
        host_s=math.fsum(float(row.get("host_self_s") or 0.0) for row in operators),
        by_operator=sorted(listed, key=lambda row: -row["seconds"]),
        busy_s=compute_s if has_device else None,
        is_distorted=distortion is not None and distortion > MAX_DISTORTION,
    )
