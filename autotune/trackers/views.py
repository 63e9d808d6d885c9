"""Makes the pages of MLflow's experiment: for each program a table of its trials, a page of charts, and a list of failures.

MLflow keeps a view as JSON in a tag of the experiment, `mlflow.sharedViewState.KEY`, and a page's address contains the KEY. The
state of a view is its columns, charts, filter and order. MLflow 3.17 reads the state from a compressed text in this JSON, and
MLflow 3.10 from separate fields. So the tag contains both.

Trials are not sorted by date, because then MLflow would hide all of them below the folded row of their study. They are sorted
by a tag: the best; other trials that may win, by ratio; trials whose rate does not count; failures; trials stopped early.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.masking import without_credentials
from autotune.plain_text import storable
from autotune.records import StudyRecord, TrialRecord
from autotune.trackers.metrics import GROUPS, LOADER_ALONE, MEMORY, RATIO, SINGLE_RATIO, STEP_ALONE, curve_names, rate_name

KIND = ("mlflow.experimentKind", "custom_model_development")  # otherwise MLflow shows the pages for language models
NOTE = "mlflow.note.content"
TAG = "mlflow.sharedViewState."
ALL = "autotune"  # key of the view of all programs
FAILURES = "-failures"
ORDER = "order"  # tag by which the tables are sorted
BEST = "best"  # tag: "yes" on the best trial's run; on the study's run, the name of the best trial: "trial 7"
MAX_PROGRAM_CHARACTERS = 120
MAX_TAG_CHARACTERS = 5000  # limit of MLflow for a tag of an experiment
MAX_KNOBS, MAX_AXES = 8, 5  # maximum numbers of knobs: in a table, and in the chart of parallel coordinates
BATCH = "loader.batch_size"
# Knobs that change the rate most. Their columns come first; the other knobs follow, sorted by name.
_FIRST = (BATCH, "loader.num_workers", "precision.amp", "layout.channels_last", "compile.mode", "optimizer.implementation")
# Columns of the tables, each with its width in pixels.
_WIDTH = 160
_NAME, _OUTCOME, _WHAT = ("attributes.`Run Name`", 260), [("tags.`outcome`", 150)], [("tags.`study`", 110), ("tags.`kind`", 90)]
_BEST = (f"tags.`{BEST}`", 90)
_FAILED = [*_OUTCOME, ("tags.`reason`", 520), ("tags.`changed`", 260), *_WHAT]
# MLflow 3.10 fails if these fields are missing; newer versions have defaults for them.
_DEFAULTS: dict[str, Any] = {
    "startTime": "ALL", "lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "datasetsFilter": [],
    "runsPinned": [], "runsHidden": [], "runsExpanded": {}, "runsVisibilityMap": {}, "groupsExpanded": {}, "groupBy": None,
}  # fmt: skip
# Groups of charts: the one made here, and those of MLflow that are folded.
_SECTION = "autotune"
_FOLDED = ("Model metrics", "interval", "progress", *dict.fromkeys(g for g in GROUPS.values() if g != "system"))
# How descriptions written by earlier versions begin or end; these may be replaced.
_OLD_ABOUT = "One parent run per study"
_OLD_ENDS = (
    "The tables leave out trials that repeat a measurement.",
    "The tables leave out the trials after the search, except the best.",
)
_ABOUT = (
    "Made by autotune: a run per study and, below it, a run per trial. Params are settings. A rate that does not count has a "
    "red cross, and `outcome` says why. A program's table leaves out the trials after the search, except the best."
)


def program(study: StudyRecord) -> str:
    """Returns the program's name: the study's title without quotes, because a quote would end the name in MLflow's search."""
    title = re.sub(r"[\s'\"`]+", " ", storable(without_credentials(study.title)))
    return title.strip()[:MAX_PROGRAM_CHARACTERS] or storable(study.name)


def key(study: StudyRecord) -> str:
    """Returns the key of a program's view."""
    return f"{ALL}-{hashlib.sha256(program(study).encode()).hexdigest()[:8]}"


def page(experiment_id: str, view: str = ALL, *, charts: bool = False) -> str:
    """Returns the address of a view, from `#` on."""
    mode = "&compareRunsMode=CHART" if charts else ""
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={view}&workflowType=machine_learning{mode}"


def tags(study: StudyRecord, first: TrialRecord | None, experiment_id: str, present: Mapping[str, str]) -> dict[str, str]:
    """Returns the experiment's tags that are missing or out of date: the views of a study's program, and the list of views.

    Args:
        study: the study.
        first: any of its trials, from which the names of the metrics follow; None if there is no trial yet.
        experiment_id: MLflow's id of the experiment.
        present: the experiment's current tags.
    """
    name, at = program(study), int(study.started_at * 1000)
    whose = f"tags.program = '{name}'"
    knobs = _searched(study)
    while len(table := _view(name, at, _state(first, knobs, f"{whose} AND tags.repeat = 'no'"))) > MAX_TAG_CHARACTERS and knobs:
        knobs.pop()
    failed = {**_state(first, knobs, f"{whose} AND attributes.status = 'FAILED'"), **_columns(_FAILED)}
    wanted = {
        KIND[0]: KIND[1],
        TAG + ALL: _view("all programs", at, _state(None, _FIRST[:5])),
        TAG + key(study): table,
        TAG + key(study) + FAILURES: _view(f"{name}: failures", at, failed),
    }
    note = present.get(NOTE, "")
    if not note or note.endswith((_ABOUT, *_OLD_ENDS)) or note.startswith(_OLD_ABOUT):  # any other note is the user's own
        wanted[NOTE] = _note(experiment_id, {**present, **wanted})
    return {tag: value for tag, value in wanted.items() if _content(tag, present.get(tag)) != _content(tag, value)}


def _note(experiment_id: str, views: Mapping[str, str]) -> str:
    """Returns the experiment's description in Markdown, with links to the pages of the newest programs."""
    text, about = "", f"\n\n{_ABOUT}"
    keys = [tag.removeprefix(TAG) for tag in views if tag.startswith(f"{TAG}{ALL}-") and not tag.endswith(FAILURES)]
    newest = []
    for view in keys:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # damaged, or not written by autotune
            state = json.loads(views[TAG + view])
            newest.append((-state["createdAt"], str(state["name"]), view))
    for name, view in [*((name, view) for _, name, view in sorted(newest)), ("all programs", ALL)]:
        pages = [("table", page(experiment_id, view)), ("charts", page(experiment_id, view, charts=True))]
        pages += [("failures", page(experiment_id, view + FAILURES))] if view != ALL else []
        line = f"- {name}: {' · '.join(f'[{title}]({address})' for title, address in pages)}\n"
        if len(text) + len(line) + len(about) > MAX_TAG_CHARACTERS:
            break
        text += line
    return text.rstrip() + about


def _searched(study: StudyRecord) -> list[str]:
    """Returns the knobs that a study searches, the most important first."""
    several = [name for name, domain in study.space.items() if len(domain.get("choice") or (0, 1)) > 1]
    return sorted(several, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))[:MAX_KNOBS]


def _view(name: str, at: int, state: Mapping[str, Any]) -> str:
    text = "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()  # as MLflow stores its own
    return json.dumps({"name": name, "createdAt": at, "state": text, **state}, separators=(",", ":"))


def _content(tag: str, value: str | None) -> Any:
    """Returns a tag's content without its dates: a view in which only the dates differ counts as unchanged."""
    if value is None or not tag.startswith(TAG):
        return value
    try:
        return {name: part for name, part in json.loads(value).items() if name not in ("createdAt", "updatedAt")}
    except (ValueError, AttributeError):
        return value


def _state(first: TrialRecord | None, knobs: Sequence[str], shown: str = "") -> dict[str, Any]:
    """Returns the state of a view: its columns and charts, for the runs that MLflow's query `shown` finds."""
    rate = rate_name(first.unit if first else "samples")
    numbers = (RATIO, SINGLE_RATIO, rate, STEP_ALONE, LOADER_ALONE, MEMORY)
    settings = [(f"params.`{name}`", _WIDTH) for name in knobs]
    return {
        **_DEFAULTS,
        "orderByKey": f"tags.`{ORDER}`",
        "orderByAsc": True,
        "searchFilter": shown,
        **_columns([*_OUTCOME, _BEST, *((f"metrics.`{name}`", _WIDTH) for name in numbers), *_WHAT, *settings]),
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": True,
        "isAccordionReordered": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "compareRunSections": _sections(),
        "compareRunCharts": _charts(rate, curve_names(first), knobs),
    }


def _columns(columns: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Returns the columns of a table, in order, from pairs of column and width in pixels."""
    names = [name for name, _ in columns]
    return {"selectedColumns": names, "columnOrder": [_NAME[0], *names], "columnWidths": dict([_NAME, *columns])}


def _sections() -> list[dict[str, Any]]:
    """Returns the groups of charts: one for the charts made here, and folded ones for the charts that MLflow adds by itself."""
    own = {"uuid": _SECTION, "name": _SECTION, "display": True, "isReordered": False, "columns": 2, "cardHeight": 320}
    names = (*_FOLDED, "System metrics")
    return [own, *({"uuid": name, "name": name, "display": False, "isReordered": False} for name in names)]


def _charts(rate: str, curves: tuple[str, str], knobs: Sequence[str]) -> list[dict[str, Any]]:
    return [
        _chart("LINE", metricKey=curves[0], selectedMetricKeys=list(curves), xAxisKey="step", lineSmoothness=0),
        _chart("BAR", metricKey=rate),
        _chart("SCATTER", xaxis={"key": BATCH, "type": "PARAM"}, yaxis={"key": MEMORY, "type": "METRIC"}),
        _chart("PARALLEL", selectedParams=list(knobs[:MAX_AXES]), selectedMetrics=[rate], showAllRuns=False),
    ]


def _chart(kind: str, **values: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": f"{_SECTION}-{kind}",
        "metricSectionId": _SECTION,
        "deleted": False,
        "isGenerated": False,
        **values,
    }
