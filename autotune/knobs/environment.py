"""Makes any environment variable a knob: env.NAME."""

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

# Variable -> the knob that sets this variable and nothing else.
KNOBS = {
    "OMP_NUM_THREADS": "threads.omp",
    "MKL_NUM_THREADS": "threads.mkl",
    **{variable: key for key, variable in nccl.VARIABLES.items()},
}
LAUNCHERS = (
    "A launcher sets it for each process. To start several processes, use launch.nproc=N, or give the program as "
    "`-- torchrun --nproc_per_node=N SCRIPT`."
)

# Variables that env.NAME must not set: name -> what to use instead. If a knob sets a variable only for some of the knob's
# values (`Knob.variables`), env.NAME may set that variable, but not together with that knob (`catalogue.clashes`).
OWNED = {
    **{variable: f"Use {key}, which is this variable." for variable, key in KNOBS.items()},
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), LAUNCHERS),
    "PYTHONPATH": "Set it in your shell: the launcher puts its own folder before it.",
}
# Variables known not to change results: they affect only memory allocation, threads and transfers.
HARMLESS = re.compile(
    r"LD_PRELOAD|(PYTORCH_(CUDA_|HIP_)?ALLOC_CONF)|CUDA_(DEVICE_MAX_CONNECTIONS|MODULE_LOADING|LAUNCH_BLOCKING)|MALLOC_\w+|"
    r"(OMP|GOMP|KMP)_\w+|MKL_(NUM_THREADS|DYNAMIC)|OPENBLAS_NUM_THREADS|NCCL_\w+|TORCH_NCCL_\w+"
)
OURS = "AUTOTUNE_"  # prefix of the variables through which the tuner talks to a trial and finds its leftover processes


def env_knob(name: str) -> Knob:
    """Returns the knob for the environment variable `name`.

    Its default is the variable's value in this process: MASK if that is a secret, "" if the variable is not set.

    Raises:
        BadInput: the name is invalid, or the variable is reserved.
    """
    key = f"{PREFIX}{name}"
    if not NAME_PATTERN.fullmatch(name):
        raise BadInput(
            f"{key}: not a name of an environment variable, got {name!r}. Allowed: letters, digits and '_', not starting with "
            "a digit. Correct the name."
        )
    if name in OWNED or name.startswith(OURS):
        raise BadInput(
            f"{key}: not free to tune, got {name!r}. {OWNED.get(name, 'autotune uses variables of this name itself.')}"
        )
    own = os.environ.get(name, "")
    return Knob(
        key=key,
        tier=Tier.exact,
        default=MASK if is_secret(name, own) else own,
        examples=("VALUE", "OTHER"),
        domain=lambda _: [],  # worthwhile values are unknown: the user lists them
        environment=lambda value: {name: str(value)},
        is_unknown=not HARMLESS.fullmatch(name),
        brief="any environment variable",
        summary=(
            f"Sets the environment variable {name} before the program's interpreter starts. It is searched at every tier, even "
            "with `tiers=exact`. Losses are compared with the baseline's before a value may win, unless the variable is known "
            "to leave results unchanged (allocators, threads, NCCL). If a knob sets the same variable (memory.malloc sets "
            "LD_PRELOAD), name only one of the two; the other is then not searched."
        ),
        helps="Allocators (LD_PRELOAD, PYTORCH_CUDA_ALLOC_CONF), CUDA_DEVICE_MAX_CONNECTIONS, KMP_AFFINITY, library switches.",
        hurts="A variable may change what is trained, say the batch size. Only the comparison of losses can then reject it.",
    )
