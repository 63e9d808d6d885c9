"""Rows of parametrized tests that run in the thorough tests only."""

from typing import Any

import pytest


def more(*rows: Any) -> list[Any]:
    """Marks further rows as thorough. One or two rows of each kind always run."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.thorough) for row in rows]
