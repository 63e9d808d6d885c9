"""autotune finds the settings with which a PyTorch training job runs fastest, proves the gain, and saves them in a file."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import Study, run

__version__ = "0.1.0"
__all__ = ["Study", "apply", "run", "trial_step"]


def __getattr__(name: str) -> Any:
    """Imports `run` and `Study` when they are first used: a training script that calls `trial_step` needs neither."""
    if name in ("Study", "run"):
        from autotune import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def apply(file: str | os.PathLike[str]) -> None:
    """Applies a best.yaml's settings to the rest of this program, as `autotune apply FILE -- COMMAND` would.

    Call it at the top of the script, if possible before `import torch`, and always before the model, the loaders and the
    optimizer are made. Even at the top, it is too late for some settings, mostly environment variables, and others cannot be
    applied at all. After the first step, standard error names both kinds. In a trial, and under `autotune apply`, nothing is
    applied.

    Args:
        file: a file written by `autotune export`.

    Raises:
        autotune.errors.BadInput: the file cannot be used; the message says why.
        ImportError: PyYAML is not installed.
    """
    from autotune.applying import apply

    apply(file)


def trial_step(samples: float | None = None) -> None:
    """Counts a training step, for programs whose steps autotune cannot detect.

    Such programs use no optimizer of torch.optim, and replace their parameters by new tensors at every step.

    Call it once after every step. If a program calls it in a trial, only these calls count as steps, not the calls of
    optimizers. Outside a trial, this function does nothing and costs a tenth of a microsecond.

    Args:
        samples: number of samples that this process trained on in this step. If not given, the samples in
            the training loader's batches are counted. If these are unknown, steps are counted instead.
    """
    harness = sys.modules.get("_autotune_harness")  # the harness is loaded under this name, not as part of autotune
    if harness is not None:
        harness.step(samples)
