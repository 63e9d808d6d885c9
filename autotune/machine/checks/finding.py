"""One finding about a machine, and how bad it is."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass


class Status(enum.StrEnum):
    """How bad a finding is, best first."""

    ok = "ok"
    skipped = "skipped"  # there is no such thing here
    warning = "warning"
    error = "error"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        group: "GPU", "connections", "host", "program" or "data".
        name: what was looked at, in a word or two.
        status: how bad it is.
        found: what was found, with numbers.
        cost: what it costs, in words; "" where it costs nothing. No figure that was not measured here.
        command: what mends it: recommended, never run; "" where no command does.
    """

    group: str
    name: str
    status: Status
    found: str
    cost: str = ""
    command: str = ""


def gpus_text(indices: Sequence[int], everybody: Collection[object] = ()) -> str:
    """Returns which GPUs: "GPU 3", "GPUs 0, 3", "all 8 GPUs"."""
    if len(indices) == len(everybody) > 1:
        return f"all {len(indices)} GPUs"
    return f"GPU{'' if len(indices) == 1 else 's'} {', '.join(map(str, indices))}"


def gpus_option(indices: Sequence[int], everybody: Collection[object]) -> str:
    """Returns nvidia-smi's option for some GPUs: " -i 0,3", nothing for all of them."""
    return "" if len(indices) == len(everybody) else f" -i {','.join(map(str, indices))}"
