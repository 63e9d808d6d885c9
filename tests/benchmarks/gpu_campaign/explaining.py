"""Stage `explaining`: does `autotune explain` name a cause planted in a GPU program, and predict little gain if there is none?

The cost of the planted cause is measured first: the program's own rate with the cause and without it.
"""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from typing import Any

from autotune.harness.explain.documents import LINES
from autotune.run_dir import StudyFolder
from tests.benchmarks.commands import run_command, run_study
from tests.benchmarks.explanation_verdicts import HEALTHY_GAIN, NUM_FIRST, findings_of
from tests.benchmarks.gpu_campaign.checks import Check, Found, Goal, Place
from tests.benchmarks.gpu_campaign.trying import DRY_OVERRIDES
from tests.benchmarks.reporting import table

MODULE = "tests.benchmarks.gpu_campaign.planted_program"
CAUSES = {  # planted cause -> the finding's cause, as printed
    "copies": "synchronous copies",
    "numbers": "item in the step",
    "launches": "launch-bound",
    "float32": "32-bit arithmetic",
    "nothing": "",
}
ALONE = ("search_space=none", "study.budget.trials=1", "search.warm_start=off", "explain.auto=false")
MINUTES, SECONDS = 1.0, 8.0


def truth(planted: str, place: Place) -> float:
    """Returns by what fraction the program is faster without the planted cause, by its own measurement."""
    words = ["-m", MODULE, planted, "--seconds", str(0.2 if place.is_dry else SECONDS), *(["--small"] if place.is_dry else [])]

    def measure() -> dict[str, float]:
        told = {name: run_command(*words, *more) for name, more in (("with", ()), ("without", ("--mended",)))}
        return {name: float(json.loads(text.splitlines()[-1])["rate_per_s"]) for name, text in told.items()}

    rates = place.kept(f"{planted}: rates", measure)
    return float(rates["without"] / rates["with"] - 1)


def explained(planted: str, place: Place) -> dict[str, Any]:
    """Returns the document that `autotune explain --json` prints for the shortest possible study."""
    runs = place.folder / "runs"
    command = [sys.executable, "-m", MODULE, planted, *(["--small"] if place.is_dry else [])]
    passes = ["--passes", LINES] if place.is_dry else []

    def measure() -> dict[str, Any]:
        run_study(runs, planted, [*ALONE, *(DRY_OVERRIDES if place.is_dry else ())], minutes=MINUTES, command=command)
        told = run_command("-m", "autotune", "explain", planted, "--runs-dir", str(runs), "--minutes", "0", "--json", *passes)
        page = StudyFolder(runs / planted).path / "report.html"
        return {"document": json.loads(told), "report_bytes": page.stat().st_size}

    return dict(place.kept(f"{planted}: explained", measure))


def named(planted: str, place: Place) -> Found:
    """The planted cause is among the first findings. Where nothing is planted, no finding predicts a large gain."""
    is_healthy = planted == "nothing"
    gain = 0.0 if is_healthy else truth(planted, place)
    told = explained(planted, place)
    findings = findings_of(told["document"])
    first = [one.cause for one in findings[:NUM_FIRST]]
    rows = [(one.cause, one.where, *(_percent(value) for value in (one.low, one.mid, one.high))) for one in findings]
    detail = table(("cause", "where", "at least", "gain", "at most"), rows) if rows else ""
    report = f"report of {told['report_bytes'] / 2**10:.0f} KiB"
    if is_healthy:
        largest = max((one.size for one in findings), default=0.0)
        goal = Goal(what="largest gain promised of a healthy program", value=largest, bound=HEALTHY_GAIN, is_ceiling=True)
        return Found(evidence=f"{len(findings)} findings; {report}", goals=[goal], detail=detail)
    cause = CAUSES[planted]
    goal = Goal(what=f"`{cause}` among the first {NUM_FIRST}", value=float(cause in first), bound=1.0)
    said = next((f"{_percent(one.low)} to {_percent(one.high)}" for one in findings if one.cause == cause), "nothing")
    words = f"costs {_percent(gain)}, {said} promised; first: {', '.join(first) or 'none'}; {report}"
    return Found(evidence=words, goals=[goal], detail=detail)


def _percent(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:+.0%}"


def checks(is_dry: bool) -> list[Check]:
    """Returns the checks of the stage. A dry run explains only one program."""
    on_cpu = ("numbers",) if is_dry else ()
    return [
        Check(
            name=f"explained: {planted}",
            run=partial(named, planted),
            needs_cuda="" if planted in on_cpu else "what it costs there, and whether it is named",
            seconds=120.0,
        )
        for planted in CAUSES
    ]
