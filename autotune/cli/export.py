"""Implements `autotune export`: writes the best configuration as a file."""

from __future__ import annotations

import sys

from autotune.cli import process_start
from autotune.cli.output import STDOUT, check_ours, encoded, output_file, write
from autotune.cli.show import read_summary
from autotune.cli.terminal import print_json
from autotune.errors import BadInput, one_of
from autotune.export.formats import check_format, file_name, render
from autotune.plain_text import plain
from autotune.records import Tier
from autotune.run_dir import StudyFolder


def export(
    folder: StudyFolder,
    *,
    format_: str,
    tier: str | None,
    output: str | None,
    is_forced: bool = False,
    as_json: bool = False,
) -> int:
    """Writes the study's best configuration to a file, or to standard output.

    Settings that the format cannot express are listed on standard error.

    Args:
        folder: the study.
        format_: member of `export.FORMATS`.
        tier: the highest tier allowed; None for the study's winner, whatever its tier.
        output: file to write, or the folder for it; None or "-" for standard output.
        is_forced: replace the file even if autotune did not write it.
        as_json: print the file's text and the settings that it lacks as one JSON document, and write no file.

    Raises:
        BadInput: no such format or tier, no winner, a file that cannot be written, or a file together with `as_json`.
    """
    check_format(format_)
    up_to = tier_named(tier)
    if as_json and output not in (None, STDOUT):
        raise BadInput(f"--json: prints the file's text and writes no file, got -o {output}, too. Leave one of them out.")
    file = output_file(output, file_name(format_, up_to))
    if file is None and not process_start.has_stdout():
        do = "Open it, or give -o FILE without --json" if as_json else "Give -o FILE"
        raise BadInput(f"--output: standard output is closed, got no file. {do}.")
    exported = render(read_summary(folder), format_, up_to, file=str(file or ""))
    if as_json:
        notes = {"header": exported.header, "notes": exported.notes, "left_out": exported.left_out}
        print_json({"study": folder.name, "format": format_, "text": exported.text, **notes})
        return 0
    if file is None:
        sys.stdout.write(exported.text)
    else:
        if not is_forced:
            check_ours(encoded(exported.text), file)
        print(plain(write(exported.text, file)), file=sys.stderr)
    for line in exported.header:
        print(line, file=sys.stderr)
    for line in exported.notes:
        print(f"note: {line.removeprefix('Note: ')}", file=sys.stderr)
    if exported.left_out:
        print(f"not expressible in {format_}, but set by `autotune apply` and included in --format yaml:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in exported.left_out), file=sys.stderr)
    return 0


def tier_named(name: str | None) -> Tier | None:
    """Returns the tier of that name; None for None.

    Raises:
        BadInput: there is no such tier.
    """
    if name is None:
        return None
    if name not in list(Tier):
        raise BadInput(f"--tier: no such tier, got {name!r}. {one_of(name, [t.value for t in Tier])}")
    return Tier(name)
