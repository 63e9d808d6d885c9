"""How the command line starts itself again, as another process."""

from __future__ import annotations

import os
from pathlib import Path

import autotune


def own_environment() -> dict[str, str]:
    """Returns an environment in which `python -m autotune` is this very package, also from a checkout, in any folder."""
    here = str(Path(autotune.__file__).resolve().parent.parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
