"""Defines what several commands share: options, handling of the words after `--`, checks of folders and addresses."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from autotune.errors import BadInput

MOST_KEY = 34  # columns; longer keys wrap


def optional(*names: str, **more: Any) -> Any:
    """Returns an option whose help shows no default. Takes the arguments of `typer.Option`."""
    return typer.Option(*names, show_default=False, **more)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Configuration: KEY=8 pins a knob, KEY=choice(4,8,16) tunes it.", show_default=False
    ),
]
ConfigDir = Annotated[
    list[str] | None,
    optional("--config-dir", metavar="DIR", help="Look for configuration files here first. May be repeated."),
]
RunsDir = Annotated[
    str | None,
    optional("--runs-dir", metavar="DIR", help="Folder of the studies: 'runs' when not given."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
IsForced = Annotated[bool, typer.Option("--force", help="Replace the file even if it does not look like one of autotune's.")]
IsQuiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and the verdict.")]
Study = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study's name (the latest of that name), its folder, or a file in it.")
]
AnyStudy = Annotated[
    str | None,
    typer.Argument(
        metavar="STUDY",
        help="A study's name (the latest of that name), its folder, or a file in it. The latest study when not given.",
        show_default=False,
    ),
]
Best = Annotated[
    str, typer.Argument(metavar="BEST", help="A best.yaml, or the name or folder of its study.", show_default=False)
]
Uri = Annotated[
    str | None,
    optional("--uri", metavar="URI", help="Tracking server or store instead of the study's own."),
]


def _bare(params: list[Any]) -> list[Any]:
    """Returns parameters whose help shows no type: `--json <bool>` would look as if it took a value. Metavars stay."""
    for param in params:
        if getattr(param, "is_flag", False) or param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
    return params


class Group(TyperGroup):
    """The commands, and the options before a command's name."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options."""
        return _bare(super().get_params(ctx))


class Command(TyperCommand):
    """A command of autotune."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options and arguments."""
        return _bare(super().get_params(ctx))


class WithCommand(Command):
    """Command that takes a program's command line after `--`, which the CLI library never sees."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the words of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


class WithKeys(WithCommand):
    """Command that also accepts configuration keys; its help ends with a list of them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help, and every key with its default and its meaning."""
        from rich.table import Table
        from rich.text import Text

        from autotune.cli.terminal import console
        from autotune.config.describe import overview

        super().format_help(ctx, formatter)
        out, rows = console(), overview()
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 1), pad_edge=False)
        table.add_column(overflow="fold", width=min(MOST_KEY, max(len(row.key) for row in rows)), style="key")
        table.add_column(ratio=1)
        for row in rows:
            table.add_row(Text(row.key), Text(row.meaning))
        out.print(Text(" Configuration: KEY=VALUE, with the default", style="name"))
        out.print(table)
        out.print(" null: not set. [command]autotune knobs[/] explains the knobs.")


def runs_folder(runs_dir: str | None) -> Path:
    """Returns the runs folder for a command that reads studies, with `~` expanded; it need not exist.

    Raises:
        BadInput: the path is empty or not a folder.
    """
    path = "runs" if runs_dir is None else os.path.expanduser(runs_dir)  # `autotune run` also expands ~
    if not path or "\0" in path or (os.path.exists(path) and not os.path.isdir(path)):
        raise BadInput(f"--runs-dir: not a folder, got {path!r}. Give the folder with the studies.")
    if os.path.isfile(os.path.join(path, "study.json")):
        there = os.path.dirname(os.path.abspath(path))
        raise BadInput(
            f"--runs-dir: a study, not the folder of the studies, got {path!r}. Give --runs-dir {shlex.quote(there)}."
        )
    return Path(path)


def address_of(uri: str | None) -> str | None:
    """Returns the tracking address given with --uri.

    Raises:
        BadInput: it is not a tracking address.
    """
    from autotune.config.checks import tracking_problems

    if problems := tracking_problems(uri, "--uri"):
        raise BadInput(problems)
    return uri


def only_runs_dir(overrides: list[str] | None, runs_dir: str | None) -> str | None:
    """Returns the value of --runs-dir.

    Raises:
        BadInput: the overrides set `runs_dir` as well.
    """
    if runs_dir is not None and any(override.lstrip("+").startswith("runs_dir=") for override in overrides or ()):
        raise BadInput(f"runs_dir: given twice, got --runs-dir {runs_dir!r} and runs_dir=.... Give one of them.")
    return runs_dir


def folders(config_dir: list[str] | None) -> tuple[Path, ...]:
    """Returns the user's configuration folders, with `~` expanded.

    Raises:
        BadInput: a path is empty.
    """
    if "" in (config_dir or ()):
        raise BadInput("--config-dir: no such folder, got ''. Give a folder.")
    return tuple(Path(os.path.expanduser(path)) for path in config_dir or ())
