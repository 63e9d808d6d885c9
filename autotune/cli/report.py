"""Implements `autotune report`: writes the results of studies into one HTML file."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.cli import process_start
from autotune.cli.output import STDOUT, check_ours, encoded, output_file, write, write_bytes
from autotune.cli.show import chosen, read_summary
from autotune.cli.terminal import print_json
from autotune.errors import BadInput
from autotune.masking import Secrets
from autotune.plain_text import plain
from autotune.run_dir import StudyFolder

REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user typed: studies, where to write, whether to replace any file there, and what to do with the new file."""

    studies: Sequence[str]
    runs: Path
    output: str | None = None
    picture: Path | None = None
    width_px: int | None = None
    is_opened: bool = False
    is_forced: bool = False


def report(asked: Asked, *, as_json: bool) -> int:
    """Writes the report of one study, or of several side by side.

    Args:
        asked: what the user typed.
        as_json: print the studies, and the path and size of the file, as one JSON document.

    Raises:
        BadInput: there is no such study, it has nothing to show, or the file cannot be written.
    """
    folders = _folders(asked, as_json=as_json)
    file = output_file(asked.output, REPORT) or _place(folders)
    summaries = [read_summary(folder) for folder in folders]
    from autotune.report.page import page
    from autotune.report.study import read

    studies = [read(folder, summary) for folder, summary in zip(folders, summaries, strict=True)]
    text = page(studies)
    content = encoded(text)
    for problem in (problem for study in studies for problem in study.unread):
        print(f"autotune: {plain(problem)}", file=sys.stderr)
    if asked.output == STDOUT:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return 0
    if not asked.is_forced and (asked.output or len(folders) > 1):  # a study's own report.html is always ours
        check_ours(content, file)
    if asked.picture:  # first: if taking the picture fails, nothing is written
        from autotune.report.picture import WIDTH_PX, take

        taken = take(text, asked.picture, width_px=asked.width_px or WIDTH_PX)
        if not asked.is_forced:
            check_ours(taken, asked.picture, "--picture")
        write_bytes(taken, asked.picture, "--picture")
    wrote = write(text, file)
    if as_json:
        picture = {"picture": str(asked.picture)} if asked.picture else {}
        print_json(
            {
                "studies": [folder.name for folder in folders],
                "file": str(file),
                "bytes": len(content),
                **picture,
            }
        )
    else:
        print(*(plain(line) for line in (wrote, f"wrote {asked.picture}" if asked.picture else "") if line), sep="\n")
    if asked.is_opened and not webbrowser.open(file.resolve().as_uri()):
        print(f"autotune: no browser could be opened. Open this file in one: {plain(str(file.resolve()))}", file=sys.stderr)
    return 0


def _folders(asked: Asked, *, as_json: bool) -> list[StudyFolder]:
    """Returns the folders of the named studies, or the folder of the latest study if none was named.

    Raises:
        BadInput: there is no such study, one was named twice, or options contradict each other.
    """
    problems = []
    if asked.width_px is not None and not asked.picture:
        problems.append(f"--width: has an effect only together with --picture, got {asked.width_px}. Give both, or neither.")
    if asked.output == STDOUT and (asked.picture or asked.is_opened):
        problems.append("--output: --picture and --open need a file, not standard output. Give -o FILE.")
    if asked.output == STDOUT and as_json:
        problems.append(
            "--json: with -o - the report itself goes to standard output, got both. Give -o FILE, or leave out --json."
        )
    if asked.output == STDOUT and not process_start.has_stdout():
        problems.append("--output: standard output is closed, got '-'. Give -o FILE.")
    named = output_file(asked.output, REPORT)
    if asked.picture and named and os.path.abspath(asked.picture) == os.path.abspath(named):
        problems.append(f"--picture: the same file as --output, got {str(asked.picture)!r}. Give another file.")
    folders = [chosen(asked.runs, name) for name in asked.studies or (None,)]
    paths = [folder.path.resolve() for folder in folders]
    problems += [
        f"STUDY: given twice, got {folder.name!r}. Give different studies." for n, folder in enumerate(folders)
        if paths[n] in paths[:n]
    ]  # fmt: skip
    if problems:
        raise BadInput(problems)
    for folder in folders:
        folder.mask = Secrets.known().stored
    return folders


def _place(folders: Sequence[StudyFolder]) -> Path:
    """Returns where the report is written by default: in the study's folder; for several studies, next to their folders."""
    return folders[0].report_file if len(folders) == 1 else folders[0].path.parent / REPORT
