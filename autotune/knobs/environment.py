"""Any environment variable as a knob: env.NAME."""

from __future__ import annotations

import os
import re

from autotune.errors import BadInput
from autotune.knobs import nccl
from autotune.knobs.base import Knob
from autotune.masking import MASK, is_secret
from autotune.records import Tier

PREFIX = "env."
NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Variable -> the knob that it is, whatever its value.
KNOBS = {
    "OMP_NUM_THREADS": "threads.omp",
    "MKL_NUM_THREADS": "threads.mkl",
    **{variable: key for key, variable in nccl.VARIABLES.items()},
}
LAUNCHERS = "A launcher gives each process its own: launch.nproc=N, or -- torchrun --nproc_per_node=N SCRIPT."

# Variables that something else is, whatever their value: name -> what to use instead. Those that a knob sets to some of their
# values (`Knob.variables`) are free, but not beside it (`catalogue.clashes`).
OWNED = {
    **{variable: f"Use {key}, which is this variable." for variable, key in KNOBS.items()},
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), LAUNCHERS),
    "PYTHONPATH": "Set it in your shell: the launcher puts its own folder before it.",
}
# Variables known to leave alone what is computed: where memory comes from, how threads and transfers are arranged.
HARMLESS = re.compile(
    r"LD_PRELOAD|(PYTORCH_(CUDA_|HIP_)?ALLOC_CONF)|CUDA_(DEVICE_MAX_CONNECTIONS|MODULE_LOADING|LAUNCH_BLOCKING)|MALLOC_\w+|"
    r"(OMP|GOMP|KMP)_\w+|MKL_(NUM_THREADS|DYNAMIC)|OPENBLAS_NUM_THREADS|NCCL_\w+|TORCH_NCCL_\w+"
)
OURS = "AUTOTUNE_"  # how the tuner speaks to the training process and finds its own


def env_knob(name: str) -> Knob:
    """Returns the knob that stands for the environment variable `name`.

    Its default is the variable's value in this process, MASK where that is a secret; "" stands for a variable that is not set.

    Raises:
        BadInput: no such variable can exist, or autotune needs it for itself.
    """
    key = f"{PREFIX}{name}"
    if not NAME_PATTERN.fullmatch(name):
        raise BadInput(
            f"{key}: not a name of an environment variable, got {name!r}. Allowed: letters, digits and '_', not starting with "
            "a digit. Correct the name."
        )
    if name in OWNED or name.startswith(OURS):
        raise BadInput(f"{key}: not free to tune, got {name!r}. {OWNED.get(name, 'Variables of this name are ours.')}")
    own = os.environ.get(name, "")
    return Knob(
        key=key,
        tier=Tier.exact,
        type=str,
        default=MASK if is_secret(name, own) else own,
        examples=("VALUE", "OTHER"),
        domain=lambda _: [],  # what is worth trying is not known: the user lists the values
        environment=lambda value: {name: str(value)},
        is_unknown=not HARMLESS.fullmatch(name),
        brief="any environment variable",
        summary=(
            f"Sets the environment variable {name} before the program's interpreter starts. It is searched at every tier, "
            "`tiers=exact` too. Unless it is one of those known to leave results alone (allocators, threads, NCCL), the losses "
            "of a value are compared with the baseline's before it may win. Where a knob sets the same variable (memory.malloc "
            "sets LD_PRELOAD), one of the two may be asked for; the other leaves the search."
        ),
        helps="Allocators (LD_PRELOAD, PYTORCH_CUDA_ALLOC_CONF), CUDA_DEVICE_MAX_CONNECTIONS, KMP_AFFINITY, library switches.",
        hurts="A variable that changes what is trained (a batch size, say) is searched like any other: a worse loss tells.",
    )
