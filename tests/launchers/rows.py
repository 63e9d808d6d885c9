"""Marks later rows of parametrized tests as thorough: each starts a job on Slurm or Ray, and shows little that is new."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest


def mark_thorough(items: Sequence[pytest.Item], folder: Path, names: Sequence[str], always: Sequence[str]) -> None:
    """Marks all rows but the first as thorough, for each test in a folder whose name contains one of `names`.

    Of the launchers' contract, only tests whose names contain one of `always` are not thorough.
    """
    seen: set[str] = set()
    for item in items:
        name = getattr(item, "originalname", "")
        if item.path.parent == folder and any(words in name for words in names):
            if name in seen:
                item.add_marker(pytest.mark.thorough)
            seen.add(name)
        if item.path == folder / "test_contract.py" and not any(words in item.name for words in always):
            item.add_marker(pytest.mark.thorough)
