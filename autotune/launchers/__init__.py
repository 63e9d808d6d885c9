"""Starts a trial's processes, watches them, and ends every one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.launchers.base import Launcher


def make_launcher(name: str) -> Launcher:
    """Returns the launcher that `launcher=` names. Imports only its module; other modules may need missing packages.

    Args:
        name: one of `config.schema.LAUNCHERS`.
    """
    if name == "local":
        from autotune.launchers.local import LocalLauncher

        return LocalLauncher()
    raise ValueError(f"no such launcher: {name}")
