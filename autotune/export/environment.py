"""Shell exports for the knobs that are environment variables, a comment for each that is not."""

from __future__ import annotations

import shlex

from autotune.export.winner import Winner
from autotune.knobs.catalogue import knob


def render(winner: Winner) -> str:
    """Returns lines for `source best.env`."""
    lines = [f"# {line}" for line in winner.headline]
    for key, value in winner.knobs.items():
        variables = knob(key).environment(value)
        lines += [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
        if not variables:
            lines.append(f"# {key}={value} is no environment variable: set it in the program.")
    return "\n".join(lines) + "\n"
