"""Implements `autotune record`: measures a table of real trials, in one or several runs, and writes it as one file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.run import Asked, carry_out, inputs_of
from autotune.errors import AutotuneError, BadInput, Interrupted
from autotune.masking import Secrets
from autotune.plain_text import escaped
from autotune.run_dir import StudyFolder
from autotune.studies import create, studies

if TYPE_CHECKING:
    from autotune.config.compose import Composed
    from autotune.records import StudyRecord
    from autotune.study import StudyInputs

PREFIX = "record-"  # prefix of the names of recording studies
TABLE = "table.jsonl.gz"  # file name, in the recording's folder
FIXED = {"measure.racing": "false"}  # every recording has these values: no trial is stopped early
# Default: each trial starts like the user's own run. The user may turn warm starts on, to record a large table in less time.
USUAL = {"launch.warm": "off"}


def record(asked: Asked, *, output: Path | None, as_json: bool) -> int:
    """Starts a recording, or resumes a recording that the same command started; returns the exit status.

    Args:
        asked: what the user typed.
        output: second file for the table; None to write it only to the recording's folder.
        as_json: print the summary and nothing else.

    Raises:
        BadInput: the request cannot be recorded.
        NothingWorked, Interrupted, FolderLost: as for `run`.
    """
    from autotune.config.compose import compose
    from autotune.machine import host_facts

    _check(asked, output)
    facts = host_facts()
    composed = compose(
        [*(f"{key}={value}" for key, value in (FIXED | USUAL).items()), *asked.overrides],
        command=asked.command,
        config_dirs=asked.config_dirs,
        runs_dir=asked.runs_dir,
        facts=facts,
    )
    if not composed.space.domains:
        raise BadInput(
            "search_space: has no domains, so there is only one configuration to record. "
            "Give domains: 'threads.intra=choice(1,2,4,8)'."
        )
    composed.name = f"{PREFIX}{composed.name.removeprefix(PREFIX)}"
    begun = _begun(Path(composed.config.runs_dir), composed)
    return run_recording(composed, facts, begun, output=output, as_json=as_json)


def run_recording(
    composed: Composed,
    facts: dict[str, object],
    begun: StudyFolder | None,
    *,
    output: Path | None,
    as_json: bool,
    is_quiet: bool = False,
) -> int:
    """Resumes the recording in the folder `begun`; None starts a new one. Other arguments and errors as for `record`."""
    from autotune.study import resume_study, run_study

    if begun:
        begun.check_free()
    inputs = _inputs(composed, facts)  # may fail for lack of a node, so the folder is made afterwards
    folder = begun or create(Path(composed.config.runs_dir), composed.name)
    code = 0
    try:
        code = carry_out(resume_study if begun else run_study, inputs, folder, as_json=as_json, is_quiet=is_quiet)
    except BaseException as stop:
        if not (isinstance(stop, Interrupted) and "record.minutes" in str(stop)):  # reaching record.minutes is a normal end
            _try_to_write(folder, output, as_json=as_json)
            raise
    _write(folder, output, as_json=as_json)
    return code


def _inputs(composed: Composed, facts: dict[str, object]) -> StudyInputs:
    from autotune.config.schema import Budget

    config = composed.config
    config.study.budget = Budget(minutes=None, trials=None)
    config.measure.racing = False  # old recordings lack this key, so resuming them would use its default: true
    return replace(inputs_of(composed, facts, is_alone=True), is_recording=True)


def _write(folder: StudyFolder, output: Path | None, *, as_json: bool) -> None:
    """Writes the table of all measurements so far. Writes nothing if the baseline failed.

    Raises:
        FolderLost: the table cannot be written to the recording's folder.
        BadInput: the table cannot be written to `output`.
    """
    from autotune.replay.export import table_of
    from autotune.replay.table import write

    try:
        table = table_of(folder)
    except BadInput:
        return
    try:
        write(table, folder.path / TABLE)
    except OSError as error:
        raise folder.lost(error) from error
    try:
        if output:
            write(table, output)
    except OSError as error:
        raise BadInput(f"--output: cannot be written, got {str(output)!r} ({error.strerror}). Give a file.") from error
    if not as_json:
        num = len(table.by_configuration())
        print(f"table  {output or folder.path / TABLE}: {num} configurations, {len(table.measurements)} measurements")


def _try_to_write(folder: StudyFolder, output: Path | None, *, as_json: bool) -> None:
    """Writes the table after an error. If that fails, too, only prints why, so that the caller raises the first error."""
    try:
        _write(folder, output, as_json=as_json)
    except (AutotuneError, OSError, ValueError) as error:
        words = Secrets.known(words=sys.argv[1:]).message(f"table: not written: {error}")
        print(f"autotune: {escaped(words)}", file=sys.stderr)


def _begun(runs: Path, composed: Composed) -> StudyFolder | None:
    """Returns the latest recording that the same command started; None if there is none."""
    found = []
    for folder in studies(runs):
        try:
            about = folder.read_study()
            if about.recording and about.base == composed.name and _is_same(about, composed):
                found.append(((about.sequence, about.started_at), folder))  # sequence numbers may be equal, see `studies.find`
        except (OSError, ValueError):
            continue
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _is_same(about: StudyRecord, composed: Composed) -> bool:
    """Whether a recording matches the request, except for repeats, minutes and the FIXED keys (which old recordings lack)."""
    from autotune.config.keys import settings

    asked = {key: domain.as_json() if domain else {"auto": True} for key, domain in composed.space.domains.items()}
    secrets = composed.secrets
    warm = about.recording.get("warm", USUAL["launch.warm"])  # an old recording lacks it
    return (about.asked, about.pinned, about.command, _chosen(about.settings), about.recording["configurations"], warm) == (
        asked,
        composed.space.pinned,
        secrets.words(composed.command.parts),
        _chosen(secrets.document(settings(composed.config))),
        composed.config.record.configurations,
        composed.config.launch.warm,
    )


def _chosen(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in FIXED}


def _check(asked: Asked, output: Path | None) -> None:
    from autotune.replay.table import SUFFIX

    keys = [word.partition("=")[0].lstrip("+") for word in asked.overrides]
    problems = [
        f"{key}: has no effect on a recording, got it on the command line. Give record.minutes=M."
        for key in keys
        if key.startswith("study.budget.")
    ]
    problems += [
        f"{key}: is {FIXED[key]} in every recording, got it on the command line. Leave it out." for key in keys if key in FIXED
    ]
    if output is not None and not output.name.endswith(SUFFIX):
        problems.append(f"--output: the name of a table ends in {SUFFIX}, got {str(output)!r}. Give NAME{SUFFIX}.")
    if problems:
        raise BadInput(problems)
