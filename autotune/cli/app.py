"""Defines the commands and their options. Each command imports its implementation when it runs, so `--help` stays fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autotune import __version__
from autotune.cli import record_replay
from autotune.cli.options import (
    AnyStudy,
    AsJson,
    Best,
    Command,
    ConfigDir,
    Group,
    IsForced,
    IsQuiet,
    Overrides,
    RunsDir,
    Study,
    Uri,
    WithCommand,
    WithKeys,
    address_of,
    folders,
    only_runs_dir,
    optional,
    runs_folder,
)
from autotune.errors import BadInput

HELP = """Finds the settings with which a PyTorch training job runs fastest here, proves the gain, and saves them in a file.

- `autotune run model=resnet18`: a built-in recipe
- `autotune run -- python train.py`: your own script, unmodified
- `autotune resume STUDY`: continue a study that ended early
- `autotune show`: trials and verdict of the latest study
- `autotune explain STUDY`: where its time goes, what a change would gain
- `autotune report STUDY --open`: its results as an HTML file
- `autotune export STUDY -o best.yaml`: the winner as a file
- `autotune apply best.yaml -- python train.py`: train with the winner
- `autotune verify best.yaml`: whether the speed-up still holds
- `autotune ui`: the trials in the MLflow UI
- `autotune doctor`: whether this machine is set up well

Exit codes: 0 success; 1 internal error; 2 bad input; 3 nothing worked, or doctor found an error; 4 a verified speed-up no
longer holds; 5 verify could not measure it; 130 interrupted.
"""

_PANEL_TUNE, _PANEL_SEE, _PANEL_KNOW = "Tune", "See and use results", "Look before you tune"
_PANEL_SEARCH = "Judge the search itself"


def build() -> Any:
    """Returns the command-line interface as a callable."""
    return typer.main.get_command(app)


app = typer.Typer(
    cls=Group,
    help=HELP,
    pretty_exceptions_enable=False,
    suggest_commands=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autotune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an internal error.")] = False,
) -> None:
    """Declares the options that come before the command's name."""


@app.command(cls=WithKeys, rich_help_panel=_PANEL_TUNE)
def run(
    context: typer.Context,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    runs_dir: RunsDir = None,
    cfg: Annotated[bool, typer.Option("--cfg", help="Print the composed configuration and stop.")] = False,
    info: Annotated[
        str | None, typer.Option("--info", metavar="searchpath", help="Print the folders searched for configuration and stop.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run and what fits the budget; start and write nothing.")
    ] = False,
    as_json: AsJson = False,
    is_quiet: IsQuiet = False,
) -> int:
    """Tune: find the fastest configuration, measure it against the baseline, keep everything in runs/STUDY.

    The command after `--` is the program to tune, any command that trains with PyTorch. Without a command, a recipe is
    tuned (model=..., data=...). The study takes eight minutes by default: study.budget.minutes=30 gives it more time.

        autotune run model=resnet18 study.budget.minutes=15
        autotune run model=gpt2_small data.sequence_length=128
        autotune run model.factory=my_pkg.models:build data.factory=my_pkg.data:build
        autotune run loader.num_workers=4 -- python train.py
        autotune run 'loader.batch_size=choice(64,128)' -- torchrun train.py
    """
    from autotune.cli import run as implementation

    given = {"--cfg": cfg, "--info": info is not None, "--dry-run": dry_run, "--json": as_json}
    first, *others = [name for name, is_given in given.items() if is_given] or [""]
    if others and first != "--dry-run":
        raise BadInput(f"{others[0]}: has no effect together with {first}, got both. Leave one of the two out.")
    asked = implementation.Asked(
        overrides=tuple(overrides or ()),
        command=context.obj,
        config_dirs=folders(config_dir),
        runs_dir=only_runs_dir(overrides, runs_dir),
    )
    if info is not None:
        return implementation.print_info(asked, info)
    if cfg:
        return implementation.print_config(asked)
    if dry_run:
        from autotune.cli.dry_run import print_plan

        return print_plan(asked, as_json=as_json)
    return implementation.run(asked, as_json=as_json, is_quiet=is_quiet)


@app.command(cls=Command, rich_help_panel=_PANEL_TUNE)
def resume(
    study: Study,
    budget: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="A larger budget: study.budget.minutes=16, study.budget.trials=40.", show_default=False
        ),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
    is_quiet: IsQuiet = False,
) -> int:
    """Continue a study that was ended by Ctrl-C, a crash, a power loss or a used-up budget.

    Finished trials are neither repeated nor lost, and a trial that was cut off is run again. The budget includes the time
    already used. The study keeps its configuration, command and working directory. Machine and program must not have changed.

        autotune resume resnet18
        autotune resume resnet18 study.budget.minutes=16
    """
    from autotune.cli import resume as implementation

    return implementation.resume(runs_folder(runs_dir), study, budget or (), as_json=as_json, is_quiet=is_quiet)


@app.command(name="list", cls=Command, rich_help_panel=_PANEL_SEE)
def list_(runs_dir: RunsDir = None, as_json: AsJson = False) -> int:
    """List the studies, latest last, with start, program and verdict.

    In other commands, a name means the latest study of that name: resnet18 is the latest of resnet18, resnet18-2
    and so on. A path means exactly one study: runs/resnet18 is the first of them.
    """
    from autotune.cli import show

    return show.print_studies(runs_folder(runs_dir), as_json=as_json)


@app.command(cls=Command, rich_help_panel=_PANEL_SEE)
def show(
    study: AnyStudy = None,
    trial: Annotated[int | None, optional("--trial", metavar="N", min=0, help="Show everything about this trial.")] = None,
    why: Annotated[bool, typer.Option("--why", help="Show where the time goes, as far as is known.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Show a study: its trials and its verdict; or everything about one trial; or where its time goes."""
    from autotune.cli import show as implementation

    folder = implementation.chosen(runs_folder(runs_dir), study)
    if why:
        from autotune.cli.explain import print_why

        return print_why(folder, trial, as_json=as_json)
    if trial is not None:
        from autotune.cli.trial import print_trial

        return print_trial(folder, trial, as_json=as_json)
    return implementation.print_study(folder, as_json=as_json)


@app.command(cls=WithCommand, rich_help_panel=_PANEL_SEE)
def explain(
    context: typer.Context,
    study: AnyStudy = None,
    trial: Annotated[
        int | None, optional("--trial", metavar="N", min=0, help="Explain this trial instead of the best.")
    ] = None,
    passes: Annotated[
        str | None,
        optional(
            "--passes",
            metavar="PASSES",
            help="Passes to run, separated by commas: lines, trace, memory; all three when not given.",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        optional("--minutes", metavar="M", min=0.0, help="Time to check findings, after the passes; 2 when not given."),
    ] = None,
    is_fixed: Annotated[
        bool,
        typer.Option(
            "--fixed", help="Measure your corrected program (the command after --) against the study's program, in pairs."
        ),
    ] = False,
    finding: Annotated[
        int | None,
        optional(
            "--finding",
            metavar="N",
            min=1,
            help="With --fixed: number of the finding that the corrected program addresses; 1 when not given.",
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        optional(
            "--pairs",
            metavar="N",
            min=2,
            max=100,
            help="With --fixed: number of pairs to measure, rounded up to an even number; 4 when not given.",
        ),
    ] = None,
    is_retrying: Annotated[
        bool,
        typer.Option("--retry", help="Try findings again whose check failed."),
    ] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Explain a study's best trial: where its time goes, what a change would gain, and whether predictions held.

    Runs the program a few more times under a profiler, and tries the settings that the findings suggest. The study's result
    stays as it is.

        autotune explain resnet18
        autotune explain resnet18 --trial 0 --passes lines
        autotune explain resnet18 --fixed -- python train_fixed.py
    """
    from autotune.cli import explain as implementation

    asked = implementation.Asked(
        study=study,
        trial=trial,
        passes=passes,
        minutes=minutes,
        is_fixed=is_fixed,
        finding=finding,
        pairs=pairs,
        is_retrying=is_retrying,
        command=context.obj,
        runs=runs_folder(runs_dir),
    )
    return implementation.explain(asked, as_json=as_json)


@app.command(cls=Command, rich_help_panel=_PANEL_SEE)
def report(
    studies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STUDY",
            help="One study, or several to compare. The latest study when not given.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None, optional("--output", "-o", metavar="FILE", help="Write here, not to runs/STUDY/report.html; - for stdout.")
    ] = None,
    is_forced: IsForced = False,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    picture: Annotated[
        Path | None,
        optional("--picture", metavar="FILE.png", help="Also save a picture of the top of the page; needs Chromium."),
    ] = None,
    width: Annotated[
        int | None, optional("--width", metavar="PX", min=320, max=4000, help="Width of the picture; 1440 when not given.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Report a study's results: one self-contained HTML file with charts, tables and suggested changes.

    Every study writes this file at its end, to runs/STUDY/report.html.
    This command writes it again at any time; it needs only the study's folder.

        autotune report resnet18 --open
        autotune report resnet18 resnet18-2 -o both.html
    """
    from autotune.cli import report as implementation

    asked = implementation.Asked(
        studies=studies or (),
        runs=runs_folder(runs_dir),
        output=output,
        picture=picture,
        width_px=width,
        is_opened=is_opened,
        is_forced=is_forced,
    )
    return implementation.report(asked, as_json=as_json)


@app.command(cls=Command, rich_help_panel=_PANEL_SEE)
def export(
    study: AnyStudy = None,
    format_: Annotated[
        str, typer.Option("--format", "-f", metavar="FORMAT", help="yaml, env, python, hf, lightning, accelerate or deepspeed.")
    ] = "yaml",
    tier: Annotated[
        str | None, optional("--tier", metavar="TIER", help="Highest tier allowed: exact, numerics or training.")
    ] = None,
    output: Annotated[str | None, optional("--output", "-o", metavar="FILE", help="Write here, not to the terminal.")] = None,
    is_forced: IsForced = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Export the best configuration as a file."""
    from autotune.cli import export as implementation
    from autotune.cli.show import chosen

    folder = chosen(runs_folder(runs_dir), study)
    return implementation.export(folder, format_=format_, tier=tier, output=output, is_forced=is_forced, as_json=as_json)


@app.command(cls=WithCommand, rich_help_panel=_PANEL_SEE)
def apply(
    context: typer.Context,
    best: Best,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Configuration of a recipe: train.epochs=3.", show_default=False),
    ] = None,
    is_quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the settings that did not take effect.")] = False,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command, environment and settings; start nothing.")
    ] = False,
    runs_dir: RunsDir = None,
) -> int:
    """Train with a best.yaml: run the command after `--` in full, with the file's settings and without measuring.

    The program replaces the autotune process: exit code, signals, terminal and files are those of the program. Before it
    starts, standard error shows what is applied and, for a recipe, what is started. After the first step it shows which
    settings took effect. A file made for a recipe needs no command.

        autotune apply best.yaml -- python train.py --epochs 90
        autotune apply best.yaml -- torchrun --nproc_per_node=2 train.py
        srun autotune apply best.yaml -- python train.py
    """
    from autotune.cli import apply as implementation

    return implementation.apply(
        implementation.Asked(
            what=best,
            overrides=tuple(overrides or ()),
            command=context.obj,
            runs=runs_folder(only_runs_dir(overrides, runs_dir)),
            is_quiet=is_quiet,
            is_dry_run=is_dry_run,
        )
    )


@app.command(cls=WithCommand, rich_help_panel=_PANEL_SEE)
def verify(
    context: typer.Context,
    best: Best,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Configuration of both baseline and best.", show_default=False),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=2, max=100, help="Rounds: baseline and best, each in a fresh process.")
    ] = 4,
    minutes: Annotated[
        float,
        typer.Option("--minutes", metavar="M", min=0.1, help="Time in all, without --long; at least two rounds always run."),
    ] = 5.0,
    long: Annotated[
        bool, typer.Option("--long", help="Also run baseline and best for several minutes each, to see if their rates last.")
    ] = False,
    long_minutes: Annotated[
        float | None,
        optional("--long-minutes", metavar="M", min=0.1, help="With --long: length of a long run; 3 when not given."),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Verify a best.yaml: measure baseline and best again, in pairs, and compare the speed-up with the file's.

    A file made for a recipe needs no command. For your own program, give the command after `--`: autotune does not run a
    command just because a file contains it. Exit code 4 means that the claim no longer holds.

        autotune verify resnet18
        autotune verify best.yaml -- python train.py
        autotune verify best.yaml --long
    """
    from autotune.cli import verify as implementation

    asked = implementation.Asked(
        what=best,
        overrides=tuple(overrides or ()),
        command=context.obj,
        runs=runs_folder(only_runs_dir(overrides, runs_dir)),
        rounds=rounds,
        minutes=minutes,
        is_long=long,
        long_minutes=long_minutes,
    )
    return implementation.verify(asked, as_json=as_json)


@app.command(cls=Command, rich_help_panel=_PANEL_SEE)
def ui(
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, optional("--port", metavar="PORT", min=1, max=65535, help="Port; 5000 or the next free one when not given.")
    ] = None,
    runs_dir: RunsDir = None,
    uri: Uri = None,
) -> int:
    """Compare trials in the MLflow UI, until Ctrl-C."""
    from autotune.cli import ui as implementation

    return implementation.serve(runs_folder(runs_dir), host=host, port=port, uri=address_of(uri))


@app.command(cls=Command, rich_help_panel=_PANEL_SEE)
def prune(
    studies: Annotated[
        list[str] | None, typer.Argument(metavar="STUDY", help="Whole studies to remove.", show_default=False)
    ] = None,
    older_than: Annotated[
        str | None, optional("--older-than", metavar="AGE", help="Whole studies not written to for this long: 12h, 30d, 8w.")
    ] = None,
    is_meant: Annotated[bool, typer.Option("--yes", help="Remove; without this, only list what would be removed.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Prune: free disk space. Lists what would be removed, with sizes, and removes it only with --yes.

    Without STUDY or --older-than, it removes what no command needs any more: compile caches of studies that are over, traces,
    logs, and files that killed processes left behind. Running studies are not touched, and all results stay.

        autotune prune
        autotune prune resnet18 --yes
        autotune prune --older-than 30d
    """
    from autotune.cli import prune as implementation

    asked = implementation.Asked(
        runs=runs_folder(runs_dir), studies=tuple(studies or ()), older_than=older_than, is_meant=is_meant
    )
    return implementation.prune(asked, as_json=as_json)


@app.command(cls=Command, rich_help_panel=_PANEL_SEE)
def sync(
    study: AnyStudy = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue while the study runs.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Sync every study in the runs folder.")] = False,
    uri: Uri = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Copy a study's missing trials to MLflow. Copying twice changes nothing."""
    from autotune.cli import sync as implementation
    from autotune.cli.show import chosen

    address = address_of(uri)
    if every and (study or follow):
        raise BadInput("--all: cannot be combined with STUDY or --follow, got both. Give one of them.")
    if every:
        return implementation.sync_all(runs_folder(runs_dir), uri=address, as_json=as_json)
    return implementation.sync(chosen(runs_folder(runs_dir), study), uri=address, follow=follow, as_json=as_json)


@app.command(cls=WithCommand, rich_help_panel=_PANEL_KNOW)
def inspect(context: typer.Context, overrides: Overrides = None, config_dir: ConfigDir = None, as_json: AsJson = False) -> int:
    """Inspect a program: what was detected, which knobs can be changed, and why others cannot.

    Runs a few training steps of the command after `--` (or of the recipe) and changes nothing.
    """
    from autotune.cli import inspect as implementation

    return implementation.inspect(list(overrides or ()), command=context.obj, config_dirs=folders(config_dir), as_json=as_json)


@app.command(cls=Command, rich_help_panel=_PANEL_KNOW)
def knobs(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A knob's key, or a family: loader.", show_default=False)
    ] = None,
    is_page: Annotated[bool, typer.Option("--page", help="Print all knobs as one Markdown page.")] = False,
    as_json: AsJson = False,
) -> int:
    """Explain the knobs: what each changes, when it helps, when it hurts."""
    from autotune.cli import knobs as implementation

    if is_page and (name is not None or as_json):
        raise BadInput(
            "--page: prints all knobs as Markdown, and cannot be combined with NAME or --json, got both. Leave out one."
        )
    return implementation.print_page() if is_page else implementation.print_knobs(name, as_json=as_json)


@app.command(cls=Command, rich_help_panel=_PANEL_KNOW)
def doctor(
    ctx: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="data.root=DIR", help="Folder of training data, to measure read speed.", show_default=False),
    ] = None,
    data: Annotated[str | None, optional("--data", metavar="DIR", help="The same as data.root=DIR.")] = None,
    python: Annotated[
        str | None, optional("--python", metavar="PYTHON", help="Interpreter of your program; autotune's when not given.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine: driver, torch, clocks, connections, cores, limits, disk; what each problem costs and how to fix it.

    Changes nothing: run the printed commands yourself.
    Exit code 3 means that an error was found.

        autotune doctor
        autotune doctor data.root=/data/imagenet
        autotune doctor --python ~/venv/bin/python --json
    """
    from autotune.cli import doctor as implementation

    return implementation.doctor(overrides or (), data=data, python=python, as_json=as_json, command=ctx.obj)


app.command(cls=WithKeys, rich_help_panel=_PANEL_SEARCH)(record_replay.record)
app.command(cls=Command, rich_help_panel=_PANEL_SEARCH)(record_replay.replay)
