"""Reads the recompilations and graph breaks of torch.compile, with their places and reasons."""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Optional

from ..knobs.module import recompile_limit_reason
from .documents import Compiled
from .sources import HARNESS, OWN, Sources

MAX_REASON = 500  # characters


class Compilations:
    """What torch.compile has compiled, and the seconds of compiling since construction. Steps left out do not count."""

    def __init__(self) -> None:
        self._before = self._step_began = _metrics()
        self._left_out: List[Any] = []

    def step_begins(self) -> None:
        """Records that what is compiled from now on belongs to the next step."""
        self._step_began = _metrics()

    def leave_out_step(self) -> None:
        """Forgets what was compiled since the current step began, for example a model in evaluation mode."""
        self._left_out += _new(_metrics(), self._step_began)

    def result(self, sources: Sources) -> Optional[Compiled]:
        """Returns the recompilations and graph breaks so far, and the seconds of compiling in the observed steps.

        Graph breaks in steps that do not count are included. Returns None if nothing was compiled.

        Args:
            sources: determines whose code a file contains.
        """
        metrics = _metrics()
        if not metrics:
            return None
        counted = _new(metrics, self._left_out)
        seconds = sum(map(_seconds, _new(counted, self._before)))
        is_limit_hit = bool(recompile_limit_reason())
        return Compiled(_recompilations(counted, sources), _graph_breaks(sources), seconds, is_limit_hit)


def _new(metrics: List[Any], known: List[Any]) -> List[Any]:
    """Returns the metrics that are not in `known`. Torch keeps only the latest 64, so their sum may become smaller."""
    ids = set(map(id, known))
    return [each for each in metrics if id(each) not in ids]


def _metrics() -> List[Any]:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return list(dynamo.get_compilation_metrics()) if dynamo is not None else []


def _seconds(metric: Any) -> float:
    micros = getattr(metric, "duration_us", None)
    return micros / 1e6 if micros else float(getattr(metric, "entire_frame_compile_time_s", None) or 0.0)


def _recompilations(metrics: List[Any], sources: Sources) -> List[Dict[str, Any]]:
    """Returns one row for each function that was compiled again, those with the most seconds first.

    If a whole model was recompiled, the function is the harness's own wrapper around the model's calls. Its row has file "".
    """
    found: Dict[Any, Dict[str, Any]] = {}
    for metric in metrics:
        reason = getattr(metric, "recompile_reason", None)
        is_again = reason or (getattr(metric, "cache_size", None) or 0) > 0
        if not is_again or not metric.co_filename:
            continue
        is_model = sources.kind_of_file(metric.co_filename) == HARNESS
        place = ("", 0, "") if is_model else (metric.co_filename, metric.co_firstlineno or 0, metric.co_name or "")
        each = found.setdefault(place, {"reason": "", "seconds": 0.0, "count": 0})
        each["reason"] = each["reason"] or str(reason or _failed_guard(metric))[:MAX_REASON]
        each["seconds"] += _seconds(metric)
        each["count"] += 1
    named = [{"file": file, "line": line, "function": name, **each} for (file, line, name), each in found.items()]
    return sorted(named, key=lambda each: -each["seconds"])


def _failed_guard(metric: Any) -> str:
    """Returns why a function was compiled again; "" if unknown. For torch 2.6 and older, whose metrics lack the reason."""
    code = (metric.co_filename, metric.co_firstlineno, metric.co_name)
    for each, reasons in getattr(sys.modules.get("torch._dynamo.utils"), "guard_failures", {}).items():
        if (each.co_filename, each.co_firstlineno, each.co_name) == code and reasons:
            return str(reasons[0])
    return ""


def _graph_breaks(sources: Sources) -> List[Dict[str, Any]]:
    """Returns one row for each place and reason, the most frequent first.

    The place is the innermost line of the program's own code or, if there is none, of a library.
    """
    found: Dict[Any, int] = {}
    for each in getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_reasons", []):
        stack = getattr(each, "user_stack", None) or []
        if getattr(each, "graph_break", True):
            frames = [frame for frame in stack if sources.kind_of_file(frame.filename) == OWN] or stack
            place = (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)
            key = (*place, str(getattr(each, "reason", ""))[:MAX_REASON])
            found[key] = found.get(key, 0) + 1
    named = [{"file": file, "line": line, "reason": reason, "count": count} for (file, line, reason), count in found.items()]
    return sorted(named, key=lambda each: -each["count"])
