"""The commands and their options. Every body imports its implementation when it runs: `autotune --help` stays quick."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from autotune import __version__
from autotune.errors import BadInput, one_of

HELP = """Finds the fastest correct way to run a PyTorch training job on this machine, proves it, and hands it over as a file.

    autotune run model=resnet18         a built-in recipe
    autotune run -- python train.py     your own script, unmodified
    autotune resume STUDY               go on with a study that was ended
    autotune show                       the latest study again
    autotune export STUDY -o best.yaml  the winner as a file
    autotune apply best.yaml -- python train.py   train with it
    autotune verify best.yaml           whether it still keeps what it claims
    autotune ui                         the trials in the MLflow UI
    autotune doctor                     whether this machine is set up well
"""

_PANEL_TUNE, _PANEL_SEE, _PANEL_KNOW = "Tune", "See and use results", "Look before you tune"
_PANEL_SEARCH = "Judge the search itself"

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Configuration: KEY=8 pins a knob, KEY=choice(4,8,16) tunes it.", show_default=False
    ),
]
ConfigDir = Annotated[
    list[str] | None,
    typer.Option(
        "--config-dir", metavar="DIR", help="Look for configuration files here first. May be repeated.", show_default=False
    ),
]
RunsDir = Annotated[
    str | None,
    typer.Option("--runs-dir", metavar="DIR", help="Folder of the studies: 'runs' when not given.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Study = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study's name: the latest of that name; or its folder, runs/NAME.")
]
AnyStudy = Annotated[
    str | None,
    typer.Argument(
        metavar="STUDY",
        help="A study's name: the latest of that name; or its folder, runs/NAME. The latest study when not given.",
        show_default=False,
    ),
]
Uri = Annotated[
    str | None,
    typer.Option("--uri", metavar="URI", help="Tracking server or store instead of the study's own.", show_default=False),
]


def build() -> Any:
    """Returns the command line as a callable object."""
    return typer.main.get_command(app)


class _WithCommand(TyperCommand):
    """A command that takes a program's command line behind `--`; the CLI library never sees that part."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the words of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


class _WithKeys(_WithCommand):
    """One that also takes the whole configuration: its help ends with every key."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help."""
        from autotune.cli.keys import print_keys

        super().format_help(ctx, formatter)
        print_keys()


app = typer.Typer(
    help=HELP,
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,
    rich_markup_mode="rich",
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
    """Options before any command."""


@app.command(cls=_WithKeys, rich_help_panel=_PANEL_TUNE)
def run(
    context: typer.Context,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    runs_dir: RunsDir = None,
    cfg: Annotated[bool, typer.Option("--cfg", help="Print the composed configuration and stop.")] = False,
    info: Annotated[
        str | None, typer.Option("--info", metavar="searchpath", help="Print where configuration is looked for and stop.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Tune: find the fastest configuration, prove it against the baseline, keep everything in runs/STUDY.

    What follows `--` is the program to tune, any command that trains with PyTorch; without it a recipe is tuned
    (model=..., data=...). Eight minutes by default: study.budget.minutes=30 gives it more time.

        autotune run model=resnet18 study.budget.minutes=15
        autotune run model=gpt2_small data.sequence_length=128
        autotune run model.factory=my_pkg.models:build data.factory=my_pkg.data:build
        autotune run loader.num_workers=4 -- python train.py
        autotune run 'loader.batch_size=choice(64,128)' -- torchrun train.py
    """
    from autotune.cli import run as implementation

    asked = implementation.Asked(
        overrides=tuple(overrides or ()),
        command=context.obj,
        config_dirs=_folders(config_dir),
        runs_dir=_only_runs_dir(overrides, runs_dir),
    )
    if info is not None:
        return implementation.print_info(asked, info)
    if cfg:
        return implementation.print_config(asked)
    return implementation.run(asked, as_json=as_json)


@app.command(rich_help_panel=_PANEL_TUNE)
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
) -> int:
    """Go on with a study, however it was ended: Ctrl-C, a crash, a power loss, a used-up budget.

    Its trials are neither repeated nor lost, what was cut off is tried again, and the time it used stays used. Configuration,
    command and working directory are those it began with; machine and program must be the same.

        autotune resume resnet18
        autotune resume resnet18 study.budget.minutes=16
    """
    from autotune.cli import resume as implementation

    return implementation.resume(_runs(runs_dir), study, budget or (), as_json=as_json)


@app.command(name="list", rich_help_panel=_PANEL_SEE)
def list_(runs_dir: RunsDir = None, as_json: AsJson = False) -> int:
    """List the studies, the latest last: when, what, how it went.

    Elsewhere a study's name means the latest of that name, and a path that very study: resnet18 is the last one run of
    resnet18, resnet18-2, ..., and runs/resnet18 the first.
    """
    from autotune.cli import show

    return show.print_studies(_runs(runs_dir), as_json=as_json)


@app.command(rich_help_panel=_PANEL_SEE)
def show(study: AnyStudy = None, runs_dir: RunsDir = None, as_json: AsJson = False) -> int:
    """Show a study: its trials and its verdict."""
    from autotune.cli import show as implementation

    return implementation.print_study(implementation.chosen(_runs(runs_dir), study), as_json=as_json)


@app.command(rich_help_panel=_PANEL_SEE)
def export(
    study: AnyStudy = None,
    format_: Annotated[
        str, typer.Option("--format", "-f", metavar="FORMAT", help="yaml, env, python, hf, lightning, accelerate or deepspeed.")
    ] = "yaml",
    tier: Annotated[
        str | None,
        typer.Option("--tier", metavar="TIER", help="Best of this tier: exact, numerics or training.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here, not to the terminal.", show_default=False)
    ] = None,
    runs_dir: RunsDir = None,
) -> int:
    """Export the best configuration as a file."""
    from autotune.cli import export as implementation
    from autotune.cli.show import chosen

    return implementation.write(chosen(_runs(runs_dir), study), format_=format_, tier=tier, output=output)


@app.command(cls=_WithCommand, rich_help_panel=_PANEL_SEE)
def apply(
    context: typer.Context,
    best: Annotated[
        str, typer.Argument(metavar="BEST", help="A best.yaml, or a study's name: its best.yaml.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Configuration of a recipe: train.epochs=3.", show_default=False),
    ] = None,
    runs_dir: RunsDir = None,
) -> int:
    """Train with a best.yaml: the command behind `--`, at full length, with the file's settings and no measuring.

    autotune becomes the program: exit code, signals, terminal, files and records are the program's own. Two lines on
    standard error say what is asked for and, after the first step, what took effect. A file of a recipe needs no command.

        autotune apply best.yaml -- python train.py --epochs 90
        autotune apply best.yaml -- torchrun --nproc_per_node=2 train.py
        srun autotune apply best.yaml -- python train.py
    """
    from autotune.cli import apply as implementation

    implementation.apply(
        implementation.Asked(
            what=best, overrides=tuple(overrides or ()), command=context.obj, runs=_runs(_only_runs_dir(overrides, runs_dir))
        )
    )


@app.command(cls=_WithCommand, rich_help_panel=_PANEL_SEE)
def verify(
    context: typer.Context,
    best: Annotated[
        str, typer.Argument(metavar="BEST", help="A best.yaml, or a study's name: its best.yaml.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Configuration that holds for both.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=2, max=100, help="Pairs of fresh processes.")] = 4,
    minutes: Annotated[
        float, typer.Option("--minutes", metavar="M", min=0.1, help="Begin no further round that would take longer.")
    ] = 5.0,
    long: Annotated[bool, typer.Option("--long", help="Then run each for minutes: does the rate last?")] = False,
    long_minutes: Annotated[float, typer.Option("--long-minutes", metavar="M", min=0.1, help="How long that is, each.")] = 3.0,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Verify a best.yaml: baseline and best again, in turns, here and now, beside what the file claims.

    A file of a recipe is enough by itself; for a program of yours give its command behind `--`, since nothing is started
    because a file says so. Exit code 4 when the claim no longer holds.

        autotune verify resnet18
        autotune verify best.yaml -- python train.py
        autotune verify best.yaml --long
    """
    from autotune.cli import verify as implementation

    asked = implementation.Asked(
        what=best,
        overrides=tuple(overrides or ()),
        command=context.obj,
        runs=_runs(_only_runs_dir(overrides, runs_dir)),
        rounds=rounds,
        minutes=minutes,
        long_minutes=long_minutes if long else None,
    )
    return implementation.verify(asked, as_json=as_json)


@app.command(rich_help_panel=_PANEL_SEE)
def ui(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Port; 5000 or the next free one when not given.", show_default=False),
    ] = None,
    runs_dir: RunsDir = None,
    uri: Uri = None,
) -> int:
    """Compare trials in the MLflow UI, until Ctrl-C."""
    from autotune.cli import ui as implementation

    return implementation.serve(_runs(runs_dir), host=host, port=port, uri=_address(uri))


@app.command(rich_help_panel=_PANEL_SEE)
def sync(
    study: AnyStudy = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on while the study runs.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every study of the folder.")] = False,
    uri: Uri = None,
    runs_dir: RunsDir = None,
) -> int:
    """Bring tracking up to date with the study's folder; doing it twice changes nothing."""
    from autotune.cli import sync as implementation
    from autotune.cli.show import chosen

    address = _address(uri)
    if every and (study or follow):
        raise BadInput("--all: every study, got a STUDY or --follow too. Give one of them.")
    if every:
        return implementation.sync_all(_runs(runs_dir), uri=address)
    return implementation.sync(chosen(_runs(runs_dir), study), uri=address, follow=follow)


@app.command(cls=_WithKeys, rich_help_panel=_PANEL_SEARCH)
def record(
    context: typer.Context,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the table here too: NAME.jsonl.gz.", show_default=False),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> int:
    """Record a table of real trials, for `autotune replay`: configurations of the search space, several times each.

    Keys and command are those of `autotune run`. The whole search space is recorded when it has no more than
    record.configurations, else a sample of it. Rounds are shuffled, so that a recording that is cut off is a fair sample; the
    same command, or `autotune resume`, goes on with it. The table is table.jsonl.gz in the recording's folder.

        autotune record model=resnet18 search_space=none 'loader.batch_size=choice(8,32,128)' 'loader.num_workers=choice(0,1,2)'
        autotune record record.minutes=10 record.repeats=3 -o table.jsonl.gz -- python train.py
    """
    from autotune.cli import record as implementation
    from autotune.cli.run import Asked

    asked = Asked(
        overrides=tuple(overrides or ()),
        command=context.obj,
        config_dirs=_folders(config_dir),
        runs_dir=_only_runs_dir(overrides, runs_dir),
    )
    return implementation.record(asked, output=output, as_json=as_json)


@app.command(rich_help_panel=_PANEL_SEARCH)
def replay(
    tables: Annotated[
        list[Path] | None, typer.Argument(metavar="TABLE...", help="Files that `autotune record` wrote.", show_default=False)
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            "--sampler",
            metavar="NAME[,NAME]",
            help="Ways to search, each NAME or NAME:KEY=VALUE:...; all but gp when not given.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, max=10_000, help="Studies of each on each table.")] = 50,
    trials: Annotated[int, typer.Option("--trials", metavar="N", min=1, max=100_000, help="Trials of a search.")] = 40,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", min=0.01, help="Budget of a study, recorded minutes.", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, max=1024, help="Processes; one a core when not given.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write curves and figures here.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="With --json: every study, too.")] = False,
    as_json: AsJson = False,
) -> int:
    """Replay searches on recorded tables, through the real study loop, and compare them.

    A trial is answered by a recorded repeat and takes its recorded seconds. Searches: default (what `autotune run` does),
    study-tpe, random, grid, expert (one knob after the other), tpe, tpe+seeds, gp (needs torch; slow), and every name of
    search.sampler. NAME:KEY=VALUE sets a configuration key, to see what a part of a search is worth.

        autotune replay tests/data/replay/*.jsonl.gz
        autotune replay table.jsonl.gz --sampler default,expert,tpe --seeds 20 --trials 20 --html curves.html
    """
    from autotune.cli import replay as implementation

    return implementation.replay(
        tables or [],
        samplers=sampler,
        seeds=seeds,
        trials=trials,
        minutes=minutes,
        jobs=jobs,
        html=html,
        as_json=as_json,
        is_raw=raw,
    )


@app.command(cls=_WithCommand, rich_help_panel=_PANEL_KNOW)
def inspect(context: typer.Context, overrides: Overrides = None, config_dir: ConfigDir = None, as_json: AsJson = False) -> int:
    """Inspect a program: what was detected, which knobs it can turn, and why not the others.

    Runs a few training steps of the command behind `--` (or of the recipe) and changes nothing.
    """
    from autotune.cli import inspect as implementation

    return implementation.inspect(list(overrides or ()), command=context.obj, config_dirs=_folders(config_dir), as_json=as_json)


@app.command(rich_help_panel=_PANEL_KNOW)
def knobs(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A knob's key.", show_default=False)] = None,
) -> int:
    """Explain the knobs: what each changes, when it helps, when it hurts."""
    from autotune.cli import knobs as implementation

    return implementation.print_knobs(name)


@app.command(rich_help_panel=_PANEL_KNOW)
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="data.root=DIR", help="Folder of the training data: how fast is it read?", show_default=False),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="The same as data.root=DIR.", show_default=False)
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            "--python", metavar="PYTHON", help="Interpreter of your program; autotune's when not given.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine: driver, torch, clocks, connections, cores, limits, disk; what each costs and what mends it.

    Looks and changes nothing: the commands that it names are yours to run. Exit code 1 when something is broken.

        autotune doctor
        autotune doctor data.root=/data/imagenet
        autotune doctor --python ~/venv/bin/python --json
    """
    from autotune.cli import doctor as implementation

    return implementation.doctor(overrides or (), data=data, python=python, as_json=as_json)


def is_usage_error(error: Exception) -> bool:
    """Returns whether an exception is the CLI library's way to say that the arguments are wrong."""
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == 2


def usage_problem(error: Exception, arguments: list[str]) -> str:
    """Returns the CLI library's complaint in autotune's form, with the nearest thing that exists."""
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "autotune")
    option = getattr(error, "option_name", None)
    see = f"See `{path} --help`."
    if option and type(error).__name__ == "NoSuchOption":
        return f"{path}: no such option, got {option!r}. {one_of(option, _options_of(context))} {see}"
    names = _commands_of(context)
    unknown = next((a for a in arguments if not a.startswith("-")), None)
    if names and unknown is not None and unknown not in names:
        return f"{path}: no such command, got {unknown!r}. {one_of(unknown, names)} {see}"
    text = str(getattr(error, "format_message", error.__str__)()).strip().rstrip(".")
    option = next((name for name in getattr(getattr(error, "param", None), "opts", []) if name in arguments[:-1]), None)
    got = f", got {arguments[arguments.index(option) + 1]!r}" if option else ""
    return f"{path}: {text[:1].lower()}{text[1:]}{got}. {see}"


def _options_of(context: Any) -> list[str]:
    parameters = context.command.get_params(context) if context is not None else []
    return [name for p in parameters for name in getattr(p, "opts", []) if name.startswith("--")]


def _commands_of(context: Any) -> list[str]:
    return sorted(getattr(getattr(context, "command", None), "commands", {}))


def _runs(runs_dir: str | None) -> Path:
    """Returns the folder of the studies for a command that reads them.

    Raises:
        BadInput: it is something else than a folder.
    """
    path = "runs" if runs_dir is None else runs_dir
    if not path or "\0" in path or (os.path.exists(path) and not os.path.isdir(path)):
        raise BadInput(f"--runs-dir: not a folder, got {path!r}. Give the folder that holds the studies.")
    return Path(path)


def _address(uri: str | None) -> str | None:
    from autotune.config.checks import tracking_problems

    if problems := tracking_problems(uri, "--uri"):
        raise BadInput(problems)
    return uri


def _only_runs_dir(overrides: list[str] | None, runs_dir: str | None) -> str | None:
    if runs_dir is not None and any(override.startswith("runs_dir=") for override in overrides or ()):
        raise BadInput(f"runs_dir: given twice, got --runs-dir {runs_dir!r} and runs_dir=.... Give one of them.")
    return runs_dir


def _folders(config_dir: list[str] | None) -> tuple[Path, ...]:
    if "" in (config_dir or ()):
        raise BadInput("--config-dir: no such folder, got ''. Give one.")
    return tuple(Path(os.path.expanduser(path)) for path in config_dir or ())
