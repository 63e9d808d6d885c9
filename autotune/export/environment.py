"""Exports the knobs that are environment variables as shell commands, and all others as comments."""

from __future__ import annotations

import shlex

from autotune.export.document import Exported, left_out_line
from autotune.export.winner import Winner

NOTHING = "No setting of this configuration is an environment variable, so this file sets nothing."


def render(winner: Winner) -> Exported:
    """Returns the text of a file that a shell reads with `. best.env`."""
    left_out = [left_out_line(key, winner.active[key]) for key in winner.in_program]
    notes = [NOTHING] if left_out and not winner.variables else []
    lines = [f"# {line}" for line in (*winner.headline, *notes)]
    lines += [f"export {name}={shlex.quote(text)}" for name, text in winner.variables.items()]
    if left_out:
        lines += [
            "# Not environment variables: set these in the program, or use `autotune apply`:",
            *(f"#   {x}" for x in left_out),
        ]
    return Exported(text="\n".join(lines) + "\n", left_out=left_out, notes=notes)
