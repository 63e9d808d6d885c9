"""Defines the commands that evaluate the search itself, `record` and `replay`, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import AsJson, ConfigDir, Overrides, RunsDir, folders, only_runs_dir, optional


def record(
    context: typer.Context,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    output: Annotated[
        Path | None, optional("--output", "-o", metavar="FILE", help="Also write the table here: NAME.jsonl.gz.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Record a table of real trials, for `autotune replay`: configurations of the search space, several times each.

    Keys and command are those of `autotune run`. The whole search space is recorded if it has at most record.configurations
    configurations, else a sample of it. Each round measures the configurations in random order, so that an interrupted
    recording is a fair sample. To continue a recording, repeat the command or use `autotune resume`. The table is
    table.jsonl.gz in the recording's folder.

        autotune record model=resnet18 search_space=none 'loader.batch_size=choice(8,32,128)' 'loader.num_workers=choice(0,1,2)'
        autotune record record.minutes=10 record.repeats=3 -o table.jsonl.gz -- python train.py
    """
    from autotune.cli import record as implementation
    from autotune.cli.run import Asked

    asked = Asked(
        overrides=tuple(overrides or ()),
        command=context.obj,
        config_dirs=folders(config_dir),
        runs_dir=only_runs_dir(overrides, runs_dir),
    )
    return implementation.record(asked, output=output, as_json=as_json)


def replay(
    tables: Annotated[
        list[Path] | None, typer.Argument(metavar="TABLE...", help="Files that `autotune record` wrote.", show_default=False)
    ] = None,
    sampler: Annotated[
        str | None,
        optional(
            "--sampler",
            metavar="NAME[,NAME]",
            help="Strategies, each NAME or NAME:KEY=VALUE:...; without this option, all but gp. `ablations` stands for "
            "several: `default`, and `default` with one part of its search switched off at a time.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, max=10_000, help="Studies per strategy and table.")] = 50,
    trials: Annotated[int, typer.Option("--trials", metavar="N", min=1, max=100_000, help="Trials per study.")] = 40,
    minutes: Annotated[
        float | None, optional("--minutes", metavar="M", min=0.01, help="Minutes per study, by its clock.")
    ] = None,
    jobs: Annotated[
        int | None, optional("--jobs", metavar="N", min=1, max=1024, help="Processes; one per core by default.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Add every study to the output of --json.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print one Markdown table for all TABLEs together.")] = False,
    as_json: AsJson = False,
) -> int:
    """Replay searches on recorded tables, through the real study loop, and compare them.

    A trial returns a recorded measurement, and the study's clock advances by the seconds recorded with it. Strategies: default
    (what `autotune run` does), study-tpe, random, grid, expert (one knob after the other), tpe, tpe+seeds, gp (needs torch;
    slow), and every name of search.sampler. NAME:KEY=VALUE sets a configuration key, to see the effect of a part of a search.

        autotune replay tests/data/replay/*.jsonl.gz
        autotune replay table.jsonl.gz --sampler default,expert,tpe --seeds 20 --trials 20
        autotune replay table.jsonl.gz --sampler ablations --markdown
    """
    from autotune.cli import replay as implementation

    return implementation.replay(
        tables or [],
        samplers=sampler,
        seeds=seeds,
        trials=trials,
        minutes=minutes,
        jobs=jobs,
        as_json=as_json,
        is_raw=raw,
        as_markdown=markdown,
    )
