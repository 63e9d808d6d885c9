"""Finds conf/ and search_spaces/: inside the package if installed from a wheel, next to the package in a checkout."""

from __future__ import annotations

import os
from pathlib import Path

import autotune

PACKAGE = Path(autotune.__file__).resolve().parent


def folder(name: str) -> Path:
    """Returns the folder `name` ("conf", "search_spaces") of this installation."""
    inside, beside = PACKAGE / name, PACKAGE.parent / name
    return inside if inside.is_dir() else beside


def program(name: str) -> Path:
    """Returns a built-in recipe's script. It is run by path, in an interpreter that may lack autotune."""
    return PACKAGE / "programs" / name


def options(kind: str, folders: list[Path]) -> list[str]:
    """Returns the names of the YAML files in the subfolder `kind` of each folder, sorted."""
    names = [name for base in folders for name in _listed(base / kind)]
    return sorted({name.removesuffix(".yaml") for name in names if name.endswith(".yaml")})


def _listed(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except (OSError, ValueError):  # no such folder, or an invalid path
        return []
