"""Counts the same steps in all ranks if some of them have less data, and the program trains within torch's `Join`.

A rank that has used up its data takes part in the collectives of the others' steps until all ranks are done. These steps count
for this rank as well, without samples. Otherwise the ranks would disagree about which step is the last one.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

from .context import TrialContext
from .patches import patches

ASK = "_get_num_nonjoined_procs"
STEPS = "_autotune_steps"  # attribute of a `Join`: number of steps when this rank last asked; None if no rank had data then


def watch(context: TrialContext) -> None:
    """Patches the function by which a rank without data asks, before each of the others' steps, whether any rank has data."""
    if not distributed.is_available():
        return
    from torch.distributed.algorithms.join import Join

    if not hasattr(Join, ASK):  # another version of torch
        return

    def around(ask: Any) -> Any:
        def asked(join: Any) -> Any:
            own = join.__dict__
            if own.get(STEPS) == context.num_steps and all(map(_averages, join._join_hooks)):
                context.step_done()
            number = ask(join)
            own[STEPS] = context.num_steps if number else None
            return number

        return asked

    patches.install(Join, ASK, around)


def _averages(hook: Any) -> bool:
    """Whether the other ranks averaged gradients since this rank last asked; they do not while they accumulate gradients."""
    return bool(getattr(getattr(hook, "ddp", None), "require_forward_param_sync", True))
