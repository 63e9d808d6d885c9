"""Makes the launcher of a study and, if its trials run on another machine, waits for that machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from autotune.cli.signals import stoppable
from autotune.cli.terminal import can_redraw, console
from autotune.errors import BadInput

if TYPE_CHECKING:
    from autotune.config.compose import Composed
    from autotune.launchers.base import Launcher, Slot

LOOK_S = 0.1


def launcher_of(composed: Composed, facts: dict[str, Any], *, is_alone: bool = False) -> tuple[Launcher, dict[str, Any]]:
    """Returns a study's launcher, and the facts of the machine that its trials run on.

    Args:
        composed: the study's configuration.
        facts: `machine.host_facts()` of this machine.
        is_alone: whether trials only run one at a time. If so, requests a single slot from a cluster.

    Raises:
        BadInput: no machine is available, the study cannot run there, or srun has started several autotunes.
        Interrupted: the user stopped the wait.
    """
    from autotune.config.cluster import problems_of_copies
    from autotune.config.schema import LOCAL
    from autotune.knobs import malloc
    from autotune.launchers import make_launcher

    if problems := problems_of_copies(os.environ):
        raise BadInput(problems)
    config, is_here = composed.config, composed.config.launcher == LOCAL
    if is_alone and not is_here:
        config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, slots=1))
    launcher = make_launcher(config, composed.command, facts)
    malloc.run_on(None)
    if is_here:
        return launcher, facts
    with stoppable("interrupted while waiting for a node: nothing was measured, and the request for a node was withdrawn"):
        try:
            slot = _slot(launcher)
            malloc.run_on(slot.facts.get(malloc.FACT))
            if composed.on_node:
                composed.on_node(slot.facts)
        except BaseException:
            with closed(launcher):
                raise
    return launcher, slot.facts


@contextlib.contextmanager
def closed(launcher: Launcher) -> Iterator[None]:
    """Closes a launcher at the end, and prints which jobs may still hold machines."""
    try:
        yield
    finally:
        launcher.close()
        for line in launcher.unended():
            console(stderr=True).print(f"autotune: {line}", markup=False)


def _slot(launcher: Launcher) -> Slot:
    """Waits until at least one node is ready, and returns the first. Shows why it is waiting."""
    out, said = console(stderr=True), ""
    with out.status("asking for a node") as status:
        while not (slots := launcher.slots()):
            if (why := launcher.why_waiting()) and why != said:
                said = why
                status.update(Text(f"waiting: {why}"))
                if not can_redraw(out):
                    out.print(f"autotune: waiting: {why}", markup=False)
            time.sleep(LOOK_S)
    names = "; ".join(slot.name for slot in slots)
    out.print(f"autotune: trials run on node{'s' if len(slots) > 1 else ''} {names}", markup=False, style="quiet")
    return slots[0]
