"""What the harness knows of particular libraries, each of which no other module of it names.

Everything else goes by what programs do with torch, so that a library nobody has heard of is treated like these.
"""

from __future__ import annotations

from typing import Any, Tuple

# Batch samplers of these modules make their batches as they go, by the `batch_size` they have then. Of any other one it is not
# known whether setting its `batch_size` changes its batches: they are looked at before the knob counts as applied.
READ_BATCH_SIZE_AS_THEY_GO: Tuple[str, ...] = ("torch.", "accelerate.")


def reads_batch_size_as_it_goes(batch_sampler: Any) -> bool:
    """Returns whether setting a batch sampler's `batch_size` is known to change its batches."""
    return type(batch_sampler).__module__.startswith(READ_BATCH_SIZE_AS_THEY_GO)
