"""Measures, stage by stage, what only a GPU can show. No measurement is repeated.

    python -m tests.benchmarks.gpu_campaign [STAGE ...] [--out FOLDER] [--work FOLDER] [--minutes 8] [--dry]

The stages, the most important first, are smoke, tutorial, record, rival, transformer, truth, explaining and overhead. If no
stage is named, all of them run. Each takes at most `--minutes`. The same command, given again, does the rest and whatever was
interrupted. A stage that fails does not affect the others.

No network is needed. If packages are missing on the machine, copy them there as wheels (`pip download`, then `pip install
--no-index --no-deps --target DIR`, and DIR on PYTHONPATH). The packages are the dependencies of autotune (pyproject.toml;
antlr4-python3-runtime, which hydra-core needs, has to be built by `pip wheel`), pytest, transformers for `transformer` and half
of `record`, and pytorch-autotune 2.0.0 for `rival`. The command names missing packages and runs what it can. Give `--minutes 5`
on a machine where a command may take at most ten minutes.

FOLDER (default runs/gpu_campaign) gets `campaign.json` with all measurements, `campaign.md` made from it, and `tables/`.
Results of another machine, another torch or a dry run are never mixed with them; remove an entry of `campaign.json` to
measure it again. Studies and trials are in `--work` (default FOLDER/work), which holds no results. `--dry` runs everything
that a CPU can run, at small sizes, and names the rest. It shows whether the campaign would run; its numbers mean nothing.

The exit code is 1 if a check failed. A missed goal is not a failure.

A stage is a module of this package with `checks(is_dry)`; a check returns `Found`, and measures through `place.kept(name,
...)`. Short checks that need a GPU are tests in tests/gpu, marked `gpu`; the docstring of such a file says what is unknown
without one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.gpu_campaign import explaining, overhead, record, rival, smoke, transformer, truth, tutorial
from tests.benchmarks.gpu_campaign.checks import FAILED, LATER, NOT_RUN, Check, Finding, Place, run_stage
from tests.benchmarks.gpu_campaign.document import Document
from tests.benchmarks.gpu_campaign.page import FILE, write_page

MINUTES = 8.0
FOLDER, DRY_FOLDER = Path("runs/gpu_campaign"), Path("runs/gpu_campaign-dry")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the campaign.

    Attributes:
        title: the question that it answers.
        checks: called with whether this is a dry run; returns the stage's checks.
    """

    title: str
    checks: Callable[[bool], Sequence[Check]]


STAGES = {
    "smoke": Stage(title="does everything work that can only be tested on a GPU?", checks=smoke.checks),
    "tutorial": Stage(title="the profiler tutorial's model, by hand and by autotune", checks=tutorial.checks),
    "record": Stage(title="tables for the replay of searches", checks=record.checks),
    "rival": Stage(title="other tuners on the same model, device and budget", checks=rival.checks),
    "transformer": Stage(title="a language model: tokens, arithmetic, memory", checks=transformer.checks),
    "truth": Stage(title="short trials against long runs", checks=truth.checks),
    "explaining": Stage(title="is what costs time on a GPU named?", checks=explaining.checks),
    "overhead": Stage(title="what autotune itself costs", checks=overhead.checks),
}
TITLES = {name: stage.title for name, stage in STAGES.items()}


def run(stages: Sequence[str], out: Path, work: Path, *, is_dry: bool, minutes: float) -> list[Finding]:
    """Runs stages, and returns their findings.

    Args:
        stages: names of the stages, in order.
        out: folder of the results.
        work: folder of studies and trials.
        is_dry: whether this is a dry run, at small sizes, whose numbers mean nothing.
        minutes: maximum time of each stage.
    """
    out.mkdir(parents=True, exist_ok=True)
    document = Document(out, is_dry=is_dry)
    document.begin(list(stages))
    findings = []
    for name in stages:
        print(f"\n{name}: {TITLES[name]}", flush=True)
        started_s = time.monotonic()
        place = Place(
            stage=name,
            folder=work / name,
            results=out,
            document=document,
            is_dry=is_dry,
            until_s=started_s + minutes * 60,
        )
        for finding in run_stage(place, STAGES[name].checks(is_dry), has_cuda=document.has_cuda):
            findings.append(finding)
            write_page(out, document, TITLES)
        print(f"         {time.monotonic() - started_s:.0f} s", flush=True)
    return findings


def main() -> int:
    """Runs the named stages; returns 1 if a check failed."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of studies and trials (default: FOLDER/work)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="maximum time of each stage")
    parser.add_argument("--dry", action="store_true", help="run what a CPU can run, at small sizes")
    options = parser.parse_args()
    if unknown := [name for name in options.stages if name not in STAGES]:
        parser.error(f"STAGE: there is no {', '.join(unknown)}. There are {', '.join(STAGES)}.")
    if options.dry:
        os.environ["OMP_NUM_THREADS"] = "1"  # rates do not matter here, and many threads would slow the programs down
    out = (options.out or (DRY_FOLDER if options.dry else FOLDER)).resolve()
    work = (options.work or out / "work").resolve()
    findings = run(options.stages or list(STAGES), out, work, is_dry=options.dry, minutes=options.minutes)
    counts = {status: sum(finding.status == status for finding in findings) for status in (FAILED, LATER, NOT_RUN)}
    print(f"\n{len(findings)} checks, " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    print(f"results  {out / FILE}")
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
