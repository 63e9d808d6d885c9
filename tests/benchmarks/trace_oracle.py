"""Compares our breakdown of recorded GPU traces with that of HolisticTraceAnalysis (HTA), and times our analysis.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis
    python -m tests.benchmarks.trace_oracle FOLDER --hta /tmp/hta/bin/python

FOLDER holds Kineto traces (`*.json`, `*.json.gz`), such as those of github.com/facebookresearch/HolisticTraceAnalysis
(tests/data) and github.com/AMD-AGI/TraceLens (tests/traces); none are part of this project. HTA's window reaches from the
device's first event to its last, so we use the same window here. In a trace with two steps or more, HTA leaves out kernels that
were launched outside of the traced calls, so we leave them out here. HTA's rounding of times to microseconds is switched off.

Four numbers are compared: the idle seconds, the computing seconds, the seconds of communication and copies that do not overlap
with computing (each only if it is at least 1 % of the window), and the share of communication that overlaps with computing.
A trace is not compared if HTA keeps less than a millisecond of it, or if it has collectives that HTA does not know by name,
because HTA counts these as computing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import Unreadable
from autotune.explain.breakdown import COLLECTIVES, GPU_CATEGORIES, ON_DEVICE, breakdown, layers_of, swept
from autotune.explain.host import host_of
from autotune.explain.intervals import seconds_in, union
from autotune.explain.kernel_names import BITS_16, BITS_32, BITS_UNKNOWN, COLLECTIVE
from autotune.explain.operators import operator_rows, operators_of
from autotune.explain.trace import DEVICE, RUNTIME, STEP, Trace, read_trace
from tests.benchmarks.reporting import machine_lines, table

COMPUTING = (BITS_16, BITS_32, BITS_UNKNOWN)
FIGURES = ("idle", "compute", "communication and copies")
MIN_FRAC = 0.01  # numbers below this share of the window are not compared
MIN_SPAN_S = 1e-3
GOAL_FRAC = 0.05
SIZES = (100_000, 1_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hta", help="interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--no-times", action="store_true", help="do not time traces of 100,000 and 1,000,000 events")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"{arguments.folder} is not a folder")
    print("\n".join(machine_lines()))
    compare(arguments.folder, arguments.hta)
    if not arguments.no_times:
        times()


def compare(folder: Path, interpreter: str | None) -> None:
    """Prints our numbers next to HTA's, and the largest difference."""
    paths = [path for path in sorted(folder.rglob("*.json*")) if path.stat().st_size]
    ours = {str(path): found for path in paths if (found := figures(path))}
    if not ours:
        print(f"no GPU trace in {folder}")
        return
    theirs = of_hta(list(ours), interpreter) if interpreter else {}
    rows, largest = [], (0.0, "", "")
    for path, found in ours.items():
        told = theirs.get(path, {})
        if "span" in told and told["span"] < MIN_SPAN_S:
            told = {"error": "HTA keeps too little"}
        if "span" in told and found["other collectives"]:
            told = {"error": f"computing for HTA: {found['other collectives']}"}
        differences = {name: _difference(found, told, name) for name in (*FIGURES, "overlap")}
        known = [(value, path, name) for name, value in differences.items() if value is not None]
        largest = max([largest, *known])
        rows.append([
            os.path.relpath(path, folder)[-48:], f"{found['step sum']:.4f}" if found["step sum"] else "no steps",
            *(_pair(found, told, name) for name in FIGURES), _overlaps(found, told),
            f"{max(known)[0]:.1%}" if known else told.get("error", "-")[:40],
        ])  # fmt: skip
    print(table(["trace", "sum/step", *(f"{name} (ours, HTA)" for name in FIGURES), "overlap", "largest difference"], rows))
    compared = sum(row[-1].endswith("%") for row in rows)
    if not compared:
        print("nothing was compared" if interpreter else "nothing was compared: HTA is needed, see --hta")
        return
    print(f"largest difference of {compared} traces: {largest[0]:.2%} ({largest[2]}, {largest[1]}); goal: {GOAL_FRAC:.0%}")


def figures(path: Path) -> dict[str, Any] | None:
    """Returns our numbers as HTA defines them; None for a file that is not a GPU trace."""
    try:
        trace = read_trace(path)
    except Unreadable:
        return None
    if not trace.has_device:
        return None
    step_sum = _sum_of_steps(trace)
    trace = _launched(trace)
    host, device = host_of(trace), trace.is_of(*DEVICE)
    window = np.array([[trace.starts_s[device].min(), trace.ends_s[device].max()]])
    seconds = dict(zip(GPU_CATEGORIES, swept(layers_of(trace, host), window, GPU_CATEGORIES)[0], strict=True))
    span = float(window[0, 1] - window[0, 0])
    computing = sum(seconds[name] for name in COMPUTING)
    communication = device & trace.is_named(COLLECTIVE.search)
    of_nccl = trace.is_named(lambda name: name.startswith("nccl"))
    total = float(seconds_in(union(trace.starts_s[communication], trace.ends_s[communication]), window)[0])
    return {
        "span": span,
        "compute": computing,
        "communication and copies": sum(seconds[name] for name in ON_DEVICE) - computing,
        "idle": span - sum(seconds[name] for name in ON_DEVICE),
        "overlap": 1 - seconds[COLLECTIVES] / total if total else None,
        "step sum": step_sum,
        "other collectives": ", ".join(sorted({_short(trace, event) for event in np.flatnonzero(communication & ~of_nccl)})),
    }


def _launched(trace: Trace) -> Trace:
    """Returns a trace without the device events whose launches HTA does not see, because HTA leaves these events out."""
    steps = trace.steps()
    if len(np.unique(trace.names[trace.is_named(lambda name: name.startswith(STEP))])) < 2:
        return trace
    calls = trace.is_of(RUNTIME) & (trace.starts_s <= steps[:, 1].max())
    kept = ~trace.is_of(*DEVICE) | np.isin(trace.correlations, trace.correlations[calls & (trace.correlations >= 0)])
    columns = ("starts_s", "ends_s", "categories", "names", "threads", "correlations", "details")
    return dataclasses.replace(trace, **{name: getattr(trace, name)[kept] for name in columns})


def of_hta(paths: list[str], interpreter: str) -> dict[str, dict[str, Any]]:
    """Returns {path: HTA's numbers}."""
    script = Path(__file__).with_name("trace_oracle_hta.py")
    environment = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1"}
    done = subprocess.run([interpreter, str(script), *paths], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def times() -> None:
    """Prints how long it takes to read and analyse traces of two sizes, like those of a small transformer on a GPU."""
    rows = []
    for number in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            write_trace(path, number)
            started = time.perf_counter()
            trace = read_trace(path)
            read_s = time.perf_counter() - started
            host = host_of(trace)
            breakdown(trace, host)
            operator_rows(trace, host, operators_of(trace, host))
            whole_s = time.perf_counter() - started
            size = path.stat().st_size
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append([f"{number:,}", f"{size / 2**20:.0f} MiB", f"{read_s:.2f} s", f"{whole_s:.2f} s", f"{peak:.0f} MiB"])
    print(table(["events", "file", "read", "with all tables", "peak memory of the process"], rows))


def write_trace(path: Path, num_events: int) -> None:
    """Writes a trace of four steps in Kineto's format."""
    with path.open("w") as out:
        out.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}], "traceEvents": [\n')
        in_step = num_events // 16
        for step in range(4):
            start = 1e6 * step
            out.write(_event("user_annotation", f"ProfilerStep#{step}", start, in_step * 12.0, 1, 1) + ",\n")
            for call in range(in_step):
                at, number = start + 12.0 * call, step * in_step + call
                shapes = {"Input Dims": [[512, 64 + call % 50], [64 + call % 50, 512]], "Input type": ["float", "float"]}
                launch = {"correlation": number, "stream": 7, "device": 0, "grid": [call % 30, 1, 1], "block": [128, 1, 1]}
                out.write(_event("cpu_op", "aten::mm", at, 10.0, 1, 1, {"External id": number, **shapes}) + ",\n")
                out.write(_event("cuda_runtime", "cudaLaunchKernel", at + 2, 5.0, 1, 1, {"correlation": number}) + ",\n")
                flow = {"ph": "s", "id": number, "pid": 1, "tid": 1, "ts": at + 2, "cat": "ac2g", "name": "ac2g"}
                out.write(json.dumps(flow) + ",\n")
                out.write(_event("kernel", f"ampere_sgemm_{call % 40}", at + 9, 8.0, 0, 7, launch) + ",\n")
        out.write('{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}]}\n')


def _event(category: str, name: str, start: float, duration: float, process: int, thread: int, args: Any = None) -> str:
    event = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": start, "dur": duration}
    return json.dumps({**event, "args": args or {}})


def _sum_of_steps(trace: Trace) -> float | None:
    try:
        found = breakdown(trace, host_of(trace))
    except Unreadable:
        return None
    return sum(found.seconds.values()) / found.step_s


def _short(trace: Trace, event: int) -> str:
    return trace.texts[trace.names[event]].partition("<")[0].rpartition("::")[2]


def _difference(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> float | None:
    mine, told = ours[name], theirs.get(name)
    if mine is None or told is None:
        return None
    if name == "overlap":
        return abs(mine - told)
    return None if max(mine, told) < MIN_FRAC * ours["span"] else abs(mine - told) / max(mine, told)


def _pair(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> str:
    told = theirs.get(name)
    return f"{1e3 * ours[name]:.3f}, {1e3 * told:.3f} ms" if told is not None else f"{1e3 * ours[name]:.3f} ms"


def _overlaps(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return ", ".join("-" if each.get("overlap") is None else f"{each['overlap']:.1%}" for each in (ours, theirs))


if __name__ == "__main__":
    main()
