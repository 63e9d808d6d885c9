"""Reuses results of earlier studies: configurations to try first, and configurations that run out of memory.

These results do not count as measurements of this study. They only decide which configurations come first and which are left
out. They are written into study.json before the search begins, so that a resumed study uses the same results even if the
earlier studies are gone:

    {"asked": search.warm_start,
     "sources": [{"study", "is_same", "differs": [key of the identity]}],     the latest first
     "seeds": [{"study", "trial", "knobs", "ratio", "is_proven", "peak_memory_bytes"}],     the best first
     "out_of_memory": [{"study", "trial", "knobs", "outcome"}]}     the smallest configurations
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autotune import stats
from autotune.compare import noise
from autotune.config.checks import memory_limit_bytes
from autotune.config.schema import AUTO, OFF
from autotune.errors import BadInput
from autotune.records import Kind, Knobs, Outcome, StudyRecord, Summary, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.studies import find, studies
from autotune.study.oom_frontier import dominates
from autotune.trials.identity import PROGRAM_FACTS, SCRIPT, identity
from autotune.trials.inputs import StudyInputs
from autotune.trials.session import Session
from autotune.trials.settings import capacity_bytes

MAX_SOURCES = 8  # only this many of the latest studies are used, because they reused the results of older ones
MAX_SEEDS = 8  # more than NUM_EARLIER_SEEDS, because some may be equal or change nothing in this study's space
DAMAGED = (OSError, LookupError, TypeError, ValueError, AttributeError)  # raised when damaged studies are read
MAX_OUT = 20  # maximum number of out-of-memory configurations; small, since each is compared with every proposal
# Prefixes of keys of a study's identity whose values must be equal. Search space, pins and objective may differ.
ALIKE = ("machine.", "program.", "device.kind", "device.index", "train.global_batch")
MACHINE = ("machine.", "device.")  # prefixes of keys that must be equal for noise to be reused
UNLIKE = ("machine.price_per_hour",)  # exceptions to ALIKE: these may differ
# Parts that change often during development. If an earlier study differs only in these, a notice names that study.
RECENT = ("program.script", "program.torch")


@dataclass(frozen=True, kw_only=True)
class Source:
    """An earlier study.

    Attributes:
        name: name of its folder.
        about: study.json.
        records: its trials.
        summary: its summary; None if it cannot be read.
        differs: keys of its identity that differ from this study's.
    """

    name: str
    about: StudyRecord
    records: list[TrialRecord]
    summary: Summary | None
    differs: list[str]


def check_named(asked: Any, runs: Path) -> None:
    """Checks that the studies named by `search.warm_start` exist.

    Raises:
        BadInput: a study does not exist or cannot be read.
    """
    for name in _names(asked):
        folder = _named(runs, name, without=None)
        try:
            folder.read_study()
        except (OSError, ValueError) as error:
            problem = f"search.warm_start: {name!r} cannot be read, got: {error}."
            raise BadInput(f"{problem} Give another study, or search.warm_start=off.") from error


def inherit(session: Session) -> dict[str, Any]:
    """Returns the results that a study reuses, as stored in study.json; {} for none. Call it after the baseline."""
    asked = session.inputs.config.search.warm_start
    if asked in (OFF, False) or not session.folder.is_kept:
        return {}
    sources = _sources(session, asked)
    seeds = [] if session.inputs.config.search.sampler == "grid" else _seeds(sources, session.about)
    out = _out_of_memory(sources, session.about, session.baseline)
    if not seeds and not out:
        return {}
    used = {entry["study"] for entry in (*seeds, *out)}
    used_sources = [{"study": s.name, "is_same": not s.differs, "differs": s.differs} for s in sources if s.name in used]
    return {"asked": asked, "sources": used_sources, "seeds": seeds, "out_of_memory": out}


def earlier_noise(session: Session) -> stats.Noise | None:
    """Returns the spread of the rate between processes on this machine, from earlier studies in the runs folder.

    Studies of the same program count more than studies of other programs. The noise of another program may be half or twice as
    large.
    """
    if not session.folder.is_kept:
        return None
    found: dict[bool, list[stats.Noise | None]] = {True: [], False: []}
    own = session.about.identity
    studies_here = [
        (folder, differs)
        for folder, differs in (
            (folder, _differing(about.identity, own))
            for folder, about in _others(session.folder.path.parent, without=session.folder.path)
        )
        if not any(name.startswith(MACHINE) for name in differs)
    ]
    for folder, differs in studies_here[:MAX_SOURCES]:
        with contextlib.suppress(*DAMAGED):
            found[not differs].append(noise.from_json(folder.read_summary().get("noise")))
    same, other = stats.pooled(found[True]), stats.pooled(found[False])
    return stats.pooled([same and same.capped(noise.SAME_PROGRAM_FREEDOM), other and other.capped(noise.OTHER_PROGRAM_FREEDOM)])


def why_nothing(session: Session) -> str:
    """Returns a note on why nothing was reused; "" if no note is needed.

    A note is needed if `search.warm_start` names a study that has nothing useful. It is also needed if another study of the
    same command differs only in the script or in torch, because `search.warm_start` must name such a study to reuse it.
    """
    config = session.inputs.config.search
    if not session.folder.is_kept:
        return ""
    if names := _names(config.warm_start):
        is_grid = config.sampler == "grid"
        why = "a grid has a fixed order" if is_grid else "no readable trial there was faster than its baseline"
        return f"search.warm_start: nothing was reused from {', '.join(names)}: {why}."
    own, folder = session.about.identity, session.folder
    for other, about in _others(folder.path.parent, without=folder.path) if config.warm_start == AUTO else []:
        differs = _differing(about.identity, own)
        is_near = differs and set(differs) <= set(RECENT) and about.identity.get(SCRIPT)
        if is_near and (source := _source(other, about, differs)) and _seeds([source], session.about):
            return (
                f"{other.name} has tuned this command with another version of the script or of torch. To begin with the best "
                f"configurations of that study: search.warm_start={_typed(other)}"
            )
    return ""


def _typed(folder: StudyFolder) -> str:
    """Returns the value of `search.warm_start` for a study: its name, or its path if the name would find another study."""
    with contextlib.suppress(BadInput):
        if find(folder.path.parent, folder.name).path == folder.path:
            return folder.name
    return str(folder.path)


def foreseen(inputs: StudyInputs, runs: Path) -> tuple[str, float] | None:
    """Returns (name, median seconds of a trial) for the latest similar study; None if there is none.

    Needs no baseline, so facts that only a baseline reveals (torch, the device) are not compared.
    """
    own = identity(inputs, None, None)
    unknown = {f"program.{name}" for name in PROGRAM_FACTS}
    for folder, about in _others(runs):
        if set(_differing(about.identity, own)) <= unknown and (source := _source(folder, about, [])):
            searched = [record for record in source.records if record.kind is Kind.search]
            seconds = [record.seconds for record in searched if record.outcome is not Outcome.interrupted]
            if seconds:
                return source.name, median(seconds)
    return None


def _names(asked: Any) -> list[str]:
    names = asked if isinstance(asked, list) else [asked]
    return [name for name in names if name not in (AUTO, OFF, False)]


def _named(runs: Path, name: str, *, without: Path | None) -> StudyFolder:
    """Returns the study with this name; a name that contains a separator is the path of the study's folder."""
    path = Path(os.path.expanduser(name))
    if os.sep in name:
        if os.path.isfile(path / "study.json"):  # in another user's private folder, Path.is_file would raise an error
            return StudyFolder(path)
        raise BadInput(f"search.warm_start: no such study, got {name!r}. Give its name, or the folder that holds study.json.")
    try:
        return find(runs, name, without=without)
    except BadInput as error:
        raise BadInput([f"search.warm_start: {problem.partition(': ')[2]}" for problem in error.problems]) from error


def _sources(session: Session, asked: Any) -> list[Source]:
    own, found = session.about.identity, []
    if names := _names(asked):
        for name in names:
            with contextlib.suppress(BadInput, OSError, ValueError):  # removed or damaged since `check_named`
                folder = _named(session.folder.path.parent, name, without=session.folder.path)
                found.append((folder, folder.read_study()))
    else:
        others = _others(session.folder.path.parent, without=session.folder.path)
        found = [(folder, about) for folder, about in others if not _differing(about.identity, own)]
    sources = [_source(folder, about, _differing(about.identity, own)) for folder, about in found[:MAX_SOURCES]]
    return [source for source in sources if source is not None]


def _others(runs: Path, *, without: Path | None = None) -> list[tuple[StudyFolder, StudyRecord]]:
    """Returns the studies of a runs folder that have a search, latest first."""
    found = []
    for folder in studies(runs):
        with contextlib.suppress(OSError, ValueError):  # damaged, or written by another version
            about = folder.read_study()
            if folder.path != without and about.identity and not (about.verifies or about.recording):
                found.append((folder, about))
    return sorted(found, key=lambda pair: -pair[1].sequence)


def _source(folder: StudyFolder, about: StudyRecord, differs: list[str]) -> Source | None:
    """Returns a study with its trials; None if it has no measured baseline or is damaged."""
    with contextlib.suppress(*DAMAGED):
        records = folder.read_trials()
        if records and records[0].kind is Kind.baseline and records[0].value:
            summary: Summary | None = None
            with contextlib.suppress(OSError, ValueError):
                summary = folder.read_summary()
            return Source(name=folder.name, about=about, records=records, summary=summary, differs=differs)
    return None


def _differing(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = [name for name in sorted({*was, *now}) if name.startswith(ALIKE) and name not in UNLIKE]
    return [name for name in names if was.get(name) != now.get(name)]


# What to begin with -------------------------------------------------------------------------------------------------------


def _seeds(sources: Sequence[Source], about: StudyRecord) -> list[dict[str, Any]]:
    """Returns the configurations that beat their baseline, sorted by ratio. Those confirmed in finals come first."""
    found: dict[frozenset[tuple[str, Any]], dict[str, Any]] = {}
    for source in sources:
        with contextlib.suppress(*DAMAGED):
            is_same_aim = source.about.objective == about.objective  # finals with another objective prove nothing for this one
            for entry in [*(_proven(source) if is_same_aim else []), *_measured(source, is_same_aim=is_same_aim)]:
                found.setdefault(frozenset(entry["knobs"].items()), entry)
    return sorted(found.values(), key=lambda entry: (not entry["is_proven"], -entry["ratio"]))[:MAX_SEEDS]


def _proven(source: Source) -> list[dict[str, Any]]:
    """Returns [the winner's entry] if the finals showed that the winner is faster; otherwise []."""
    summary = source.summary or {}
    best, speedup = summary.get("best") or {}, summary.get("speedup") or {}
    if speedup.get("verdict") != "faster" or not best.get("overrides") or not best.get("knobs"):
        return []
    first = next((record for record in source.records if record.number == best.get("trial")), None)
    peak = first.peak_memory_bytes if first else None
    return [_entry(source, int(best["trial"]), best["knobs"], float(speedup["ratio"]), peak, is_proven=True)]


def _measured(source: Source, *, is_same_aim: bool) -> list[dict[str, Any]]:
    """Returns the search trials that beat their baseline and were not ruled out by loss parity."""
    barred = [entry["knobs"] for entry in ((source.summary or {}).get("parity") or {}).get("failed") or []]

    def aim(record: TrialRecord) -> float:
        return (record.score if is_same_aim else record.value) or 0.0

    able = [
        record
        for record in source.records
        if record.kind is Kind.search
        and record.outcome.may_win
        and record.changed
        and not any(part.items() <= record.changed.items() for part in barred)
    ]
    reference = aim(source.records[0])
    ratios = [(aim(record) / reference, record) for record in able] if reference else []
    return [
        _entry(source, record.number, record.knobs, ratio, record.peak_memory_bytes, is_proven=False)
        for ratio, record in sorted(ratios, key=lambda pair: -pair[0])[:MAX_SEEDS]
        if ratio > 1
    ]


def _entry(
    source: Source, trial: int, knobs: Knobs, ratio: float, peak_bytes: int | None, *, is_proven: bool
) -> dict[str, Any]:
    if not math.isfinite(ratio):
        raise ValueError(f"a ratio that is not a number, got {ratio}")
    return {
        "study": source.name,
        "trial": trial,
        "knobs": knobs,
        "ratio": ratio,
        "is_proven": is_proven,
        "peak_memory_bytes": None if peak_bytes is None else int(peak_bytes),
    }


# What to leave out --------------------------------------------------------------------------------------------------------


def _out_of_memory(sources: Iterable[Source], about: StudyRecord, baseline: TrialRecord) -> list[dict[str, Any]]:
    """Returns the smallest configurations of this program that ran out of memory in studies with no less memory than this one.

    A failure does not count if a configuration that needs at least as much memory worked, in one of these studies or as the
    baseline of this study. In that case, another process must have used the memory.
    """
    alike = [source for source in sources if not source.differs]
    ran = [baseline.knobs, *(record.knobs for source in alike for record in source.records if record.outcome.has_value)]
    found: list[dict[str, Any]] = [
        {"study": source.name, "trial": record.number, "knobs": record.knobs, "outcome": str(record.outcome)}
        for source in alike
        for record in source.records
        if record.kind is Kind.search and record.outcome.is_memory and _has_no_more(about, source.about, record.outcome)
    ]
    true = [entry for entry in found if not any(_needs_as_much_memory(knobs, entry) for knobs in ran)]
    least: list[dict[str, Any]] = []
    for entry in true:
        if not any(_needs_as_much_memory(entry["knobs"], other) for other in least):
            least = [other for other in least if not _needs_as_much_memory(other["knobs"], entry)] + [entry]
    return least[:MAX_OUT]


def _needs_as_much_memory(knobs: Knobs, out: dict[str, Any]) -> bool:
    return dominates(knobs, out["knobs"], is_host=out["outcome"] == Outcome.host_oom)


def _has_no_more(about: StudyRecord, other: StudyRecord, outcome: Outcome) -> bool:
    """Whether a study has at most as much memory as another one, host or device as `outcome` says; False if unknown."""
    own, there = _memory_bytes(about, outcome), _memory_bytes(other, outcome)
    return own is not None and there is not None and own <= there


def _memory_bytes(about: StudyRecord, outcome: Outcome) -> int | None:
    """Returns the memory available to a trial; None if unknown. On a GPU, `device.memory_limit` does not limit host memory."""
    with contextlib.suppress(BadInput, *DAMAGED):
        if outcome is Outcome.host_oom and about.machine.get("gpus"):
            return int(about.machine["memory_bytes"])
        there = capacity_bytes(about.machine)
        return memory_limit_bytes(about.identity.get("device.memory_limit"), there) or there
    return None
