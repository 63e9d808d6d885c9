"""Writes a study's report into its folder."""

from __future__ import annotations

from pathlib import Path

from autotune.documents import write_text
from autotune.records import Summary
from autotune.run_dir import StudyFolder


def write_report(folder: StudyFolder, summary: Summary) -> Path:
    """Writes report.html and returns its path.

    Raises:
        OSError: it cannot be written.
    """
    from autotune.report.page import page
    from autotune.report.study import read

    write_text(folder.report_file, page([read(folder, summary)]))
    return folder.report_file
