"""Lists the knobs in the search spaces that come with autotune."""

from __future__ import annotations

from autotune.config import yaml_file
from autotune.config.locate import folder, options


def keys_of_spaces() -> dict[str, list[str]]:
    """Returns name of search space -> keys of its knobs."""
    place = folder("search_spaces")
    return {
        name: [str(key) for key in yaml_file.read(place / f"{name}.yaml", name)]
        for name in options("search_spaces", [place.parent])
    }
