"""Which tests of an engine run always: each starts a job of its own, and rows of a table show little more about an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest


def mark_later_rows(items: Sequence[pytest.Item], folder: Path, names: Sequence[str]) -> None:
    """Marks as thorough all but the first row of the tests in a folder whose names contain one of some words."""
    seen: set[str] = set()
    for item in items:
        name = getattr(item, "originalname", "")
        if item.path.parent == folder and any(words in name for words in names):
            if name in seen:
                item.add_marker(pytest.mark.thorough)
            seen.add(name)
