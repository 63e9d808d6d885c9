"""Which knobs the search spaces that come with autotune hold."""

from __future__ import annotations

from autotune.config import yaml_file
from autotune.config.locate import folder, options


def keys_of_spaces() -> dict[str, list[str]]:
    """Returns name of a search space -> keys of the knobs in it."""
    place = folder("search_spaces")
    return {
        name: [str(key) for key in yaml_file.read(place / f"{name}.yaml", name)]
        for name in options("search_spaces", [place.parent])
    }
