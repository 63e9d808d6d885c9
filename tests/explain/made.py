"""Makes documents of the passes, and evidence. A test passes only the values that matter to it."""

from __future__ import annotations

from typing import Any

from autotune.explain.evidence import Evidence
from autotune.harness.explain.documents import (
    FORWARD,
    INPUT,
    MAIN,
    OTHER,
    STEP_PHASES,
    WORKER,
    Line,
    Lines,
    Memory,
    Site,
    Stage,
)
from autotune.knobs.base import HostContext
from autotune.records import TrialRecord
from tests.support.records import a_trial

STEP_S = 0.1
HOST = HostContext(num_cores=2, cpu_isa=frozenset({"avx2", "amx_bf16"}))


def line(text: str, self_s: float, **more: Any) -> Line:
    given = {"file": "/home/me/train.py", "line": 10, "function": "main", "phase": OTHER, "where": MAIN, "is_own": True}
    return Line(**{**given, "text": text, "self_s": self_s, "total_s": self_s, **more})


def worker_line(text: str, self_s: float, **more: Any) -> Line:
    return line(text, self_s, **{"phase": INPUT, "where": WORKER, "function": "Photos.__getitem__", "line": 30, **more})


def stage(name: str, seconds: float, *, where: str = WORKER, blocked_s: float = 0.0, **more: Any) -> Stage:
    return Stage(name=name, where=where, seconds=seconds, cpu_s=seconds - blocked_s, blocked_s=blocked_s, count=100, **more)


def site(kind: str, count: float, seconds: float, *, at: Line) -> Site:
    return Site(
        kind=kind, file=at.file, line=at.line, function=at.function, text=at.text, phase=at.phase, count=count, seconds=seconds
    )


def phases(**seconds: float) -> dict[str, float]:
    rest = STEP_S - sum(seconds.values())
    return {**dict.fromkeys(STEP_PHASES, 0.0), FORWARD: rest, **seconds}


def lines(*found: Line, stages: tuple[Stage, ...] = (), rank: int = 0, world_size: int = 1, **more: Any) -> Lines:
    given: dict[str, Any] = {
        "device": "cpu", "steps": 50, "seconds": 50 * STEP_S, "samples": 50 * 32.0, "unit": "samples", "phases_s": phases(),
        "device_phases_s": None, "wait_s": 0.0, "num_workers": 0, "batch_size": 32, "num_samples": 2500,
        "syncs": [], "gc_s": 0.0, "gc_count": 0.0,
    }  # fmt: skip
    return Lines(rank=rank, world_size=world_size, lines=list(found), stages=list(stages), **{**given, **more})


def memory(**more: Any) -> Memory:
    given: dict[str, Any] = {
        "rank": 0, "world_size": 1, "device": "cpu", "peak_bytes": 10**9, "parameters": 10**8,
        "gradients": 10**8, "optimizer_state": 10**8, "activations": 7 * 10**8, "input": 0, "other": 0, "by_module": [],
        "flops": None, "samples": 32.0, "unit": "samples",
    }  # fmt: skip
    return Memory(**{**given, **more})


def record(**more: Any) -> TrialRecord:
    return a_trial(**{"value": 320.0, **more})


def evidence(*documents: Lines, knobs: dict[str, Any] | None = None, **more: Any) -> Evidence:
    given: dict[str, Any] = {"host_context": HOST, "cwd": "/home/me", "record": record(knobs=knobs or {})}
    return Evidence(**{**given, "lines": documents, **more})
