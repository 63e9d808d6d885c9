"""Prints HolisticTraceAnalysis's (HTA's) numbers for traces as JSON. The interpreter needs HTA but not autotune.

python trace_oracle_hta.py TRACE...
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import Any


def figures(path: str) -> dict[str, Any]:
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: path}, trace_dir="/", include_last_profiler_step=True)
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    return {
        "span": float(times["kernel_time(us)"]) * 1e-6,
        "idle": float(times["idle_time(us)"]) * 1e-6,
        "compute": float(times["compute_time(us)"]) * 1e-6,
        "communication and copies": float(times["non_compute_time(us)"]) * 1e-6,
        "overlap": None if overlap != overlap else float(overlap) / 100,
    }


def main() -> None:
    logging.disable(logging.CRITICAL)
    found = {}
    for path in sys.argv[1:]:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found[path] = figures(path)
            except Exception as error:  # HTA passes on any exception of pandas
                found[path] = {"error": f"{type(error).__name__}: {error}"[:200]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
