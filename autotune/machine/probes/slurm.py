"""Probes Slurm: whether it is installed here, and whether its controller answers."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

ANSWER_S = 5.0


def slurm() -> dict[str, Any] | None:
    """Returns {"partitions" (names, the default one first), "problem" ("" if the controller answers)}; None without srun."""
    if shutil.which("srun") is None:
        return None
    try:
        asked = ["sinfo", "--noheader", "--format=%R|%P"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"partitions": [], "problem": f"sinfo did not answer ({type(error).__name__})"}
    if answer.returncode:
        words = answer.stderr.strip().splitlines() or [f"status {answer.returncode}"]
        return {"partitions": [], "problem": words[-1]}
    rows = [line.split("|") for line in answer.stdout.splitlines() if "|" in line]
    default = [name for name, marked in rows if marked.endswith("*")]
    return {"partitions": list(dict.fromkeys([*default, *(name for name, _ in rows)])), "problem": ""}
