"""Stage `record`: records tables of an image classifier and of a language model, on which searches are replayed.

`autotune record` measures in rounds, each in random order. So an interrupted recording is a fair sample. The next run of the
command continues it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from autotune.replay.table import read
from autotune.run_dir import StudyFolder
from tests.benchmarks.commands import SLACK_S, run_command
from tests.benchmarks.gpu_campaign.checks import Check, Found, Missing, Place
from tests.benchmarks.gpu_campaign.trying import DRY_OVERRIDES

REPEATS = 3
TABLES = "tables"  # folder of the results


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job to record.

    Attributes:
        title: title for people.
        name: name of the table.
        overrides: overrides that set the recipe and the search space.
        num_configurations: number of configurations to record: all of the space, so that a search can propose any of them.
    """

    title: str
    name: str
    overrides: tuple[str, ...]
    num_configurations: int = 48


WORKLOADS = (
    Workload(
        title="a table of resnet18 on photos",
        name="resnet18_photos",
        overrides=(
            "model=resnet18", "data=photos", "search_space=none", "loader.batch_size=choice(64,256)",
            "loader.num_workers=choice(0,4,12)", "precision.amp=choice(off,bf16)", "layout.channels_last=choice(false,true)",
            "compile.mode=choice(off,default)",
        ),
    ),
    Workload(
        title="a table of GPT-2 small on text",
        name="gpt2_small_text",
        overrides=(
            "model=gpt2_small", "data=text", "data.sequence_length=512", "search_space=none",
            "loader.batch_size=choice(8,32,128)", "loader.num_workers=choice(0,4)", "precision.amp=choice(off,bf16)",
            "compile.mode=choice(off,default)", "optimizer.implementation=choice(default,fused)",
        ),
    ),
)  # fmt: skip
DRY = Workload(
    title="a table of mlp",
    name="mlp",
    num_configurations=2,
    overrides=(
        "model=mlp", "data=tabular", "model.hidden_size=16", "search_space=none", "loader.batch_size=choice(32,64)",
        *DRY_OVERRIDES,
    ),
)  # fmt: skip


def record(workload: Workload, share: float, place: Place) -> Found:
    """Records for a share of the time that is left; the same command continues the recording.

    Args:
        workload: the training job.
        share: share of the stage's remaining time.
        place: the stage's place.
    """
    runs, repeats = place.folder / "runs", 1 if place.is_dry else REPEATS
    table = place.results / TABLES / f"{workload.name}.jsonl.gz"
    table.parent.mkdir(parents=True, exist_ok=True)
    study = StudyFolder(runs / f"record-{workload.name}")
    if table.exists() and not study.path.exists():
        raise Missing(f"{table} exists but its recording {study.path} does not: it would be written over. Move the table away.")
    minutes = max(0.5, share * place.left_s / 60)
    asked = [
        f"record.minutes={minutes:.2f}",
        f"record.repeats={repeats}",
        f"record.configurations={workload.num_configurations}",
    ]
    words = [*workload.overrides, *asked, f"study.name={workload.name}", f"runs_dir={runs}", "-o", str(table)]
    began_s = time.monotonic()
    run_command("-m", "autotune", "record", *words, timeout_s=minutes * 60 + SLACK_S)
    is_whole, measured = study.read_summary()["status"] == "complete", read(table)
    num_measured, num_configurations = len(measured.measurements), len(measured.by_configuration())
    rest = "" if is_whole else f" of {workload.num_configurations * repeats}, the same command continues"
    spent = f"{time.monotonic() - began_s:.0f} s in this run; {table.relative_to(place.results)}"
    return Found(evidence=f"{num_configurations} configurations, {num_measured} measurements{rest}; {spent}", is_whole=is_whole)


def checks(is_dry: bool) -> list[Check]:
    """Returns the checks of the stage; the first workload gets half of the stage's time."""
    if is_dry:
        size = "its size on a GPU"
        left_out = [Check(name=each.title, run=partial(record, each, 1.0), needs_cuda=size) for each in WORKLOADS]
        return [Check(name=DRY.title, run=partial(record, DRY, 1.0)), *left_out]
    return [
        Check(name=each.title, run=partial(record, each, 1 / (len(WORKLOADS) - number)), seconds=60.0)
        for number, each in enumerate(WORKLOADS)
    ]
