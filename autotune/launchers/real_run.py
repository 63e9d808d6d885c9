"""Prepares a real run with the knobs of a best.yaml: the environment of its processes, and the announcement before it starts.

`autotune apply` sets the environment and then becomes the program (exec). `autotune.apply` sets it inside the program. The
whole spec is passed in the environment, so it reaches every rank on every node, and no folder is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from autotune.config.best_file import Best
from autotune.harness import protocol
from autotune.knobs import malloc
from autotune.knobs.memory import MALLOC
from autotune.launchers.injection import INJECT, first_on
from autotune.plain_text import one_line
from autotune.records import Knobs
from autotune.wording import changes_phrase

MAX_LINE = 300
PROGRAM = {"program.torch": "torch", "program.device_name": "device_name"}  # identity key in best.yaml -> key in `Spec.made_on`
MACHINE = {"machine.cpu_model": "{}", "machine.num_cores": "{} cores"}  # identity key in best.yaml -> its wording


def spec_text(best: Best, *, passed: Knobs, late: dict[str, str] | None = None, is_quiet: bool = False) -> str:
    """Returns the spec of a real run, as protocol.SPEC_VARIABLE holds it.

    Args:
        best: what to apply.
        passed: knobs that the command line already sets.
        late: knob key -> why it can no longer be applied.
        is_quiet: whether the run reports only settings that did not take effect.
    """
    knobs = best.open_knobs
    spec = protocol.Spec(
        trial=0,
        nonce="",
        folder="",
        mode="apply",
        knobs={key: value for key, value in knobs.items() if key not in passed},
        passed=passed,
        target=best.target,
        origin=os.path.basename(best.file),
        made_on={short: best.identity[name] for name, short in PROGRAM.items() if name in best.identity},
        late=late or {},
        is_quiet=is_quiet,
    )
    return json.dumps(dataclasses.asdict(spec))


def variables(best: Best, spec: str) -> dict[str, str]:
    """Returns the environment variables that a real run adds or replaces."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(INJECT)]
    own = {"PYTHONPATH": first_on(os.pathsep.join(paths)), protocol.SPEC_VARIABLE: spec}
    return {**best.environment(), **own}


def announce(best: Best, notes: Sequence[str] = ()) -> None:
    """Prints to standard error, on rank 0 only, which settings will be applied and where they were tuned."""
    if protocol.launched_rank(os.environ) != 0:
        return
    study, ratio, day = best.origin
    made = ", ".join(part for part in (ratio, f"study {study}" if study else "", day) if part)
    phrase = changes_phrase(best.shown_knobs, none="changes nothing: the program runs as it is")
    lines = [f"{best.file}: {phrase}{f' ({made})' if made else ''}", *_differences(best), *missing(best), *notes]
    with contextlib.suppress(OSError, ValueError):  # standard error is closed, or its disk is full: the run continues
        sys.stderr.write("".join(f"autotune: {one_line(line, MAX_LINE)}\n" for line in lines))
        sys.stderr.flush()


def missing(best: Best) -> list[str]:
    """Returns a warning if this machine lacks the memory allocator's library; [] otherwise.

    The library's path is always looked up on this machine, because a path taken from a file could load any code.
    """
    asked = best.knobs.get(MALLOC.key)
    if asked not in malloc.LIBRARIES or asked in malloc.installed():
        return []
    return [f"{MALLOC.key}={asked} cannot take effect: lib{asked} is not installed on this machine"]


def _differences(best: Best) -> list[str]:
    """Returns how this machine differs from the one where the file was made; the harness compares torch and GPU."""
    here = _here()
    differing = [name for name in MACHINE if best.identity.get(name) and here and best.identity[name] != here[name]]
    there, now = ([MACHINE[name].format(side[name]) for name in differing] for side in (best.identity, here))
    return [f"made on {', '.join(there)}; here: {', '.join(now)}"] if differing else []


def _here() -> dict[str, Any]:
    try:
        from autotune.machine import comparable, host_facts
    except ImportError:  # the user's environment may lack psutil
        return {}
    return {f"machine.{name}": value for name, value in comparable(host_facts()).items()}
