"""Defines a finding about a machine, and how severe it is."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass


class Status(enum.StrEnum):
    """Severity of a finding, best first."""

    ok = "ok"
    skipped = "skipped"  # not present on this machine, or unknown
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        group: "GPU", "connections", "host", "program" or "data".
        name: what was checked, in a word or two.
        found: what was found, with numbers.
        status: how severe it is.
        cost: what the problem costs, in words; "" if there is no problem. Any numbers in it were measured on this machine.
        command: shell command that fixes or examines the problem, shown but never run; "" if there is none.
    """

    group: str
    name: str
    found: str
    status: Status = Status.ok
    cost: str = ""
    command: str = ""


def gpus_text(indices: Sequence[int], all_gpus: Collection[object] = ()) -> str:
    """Returns a name for some GPUs: "GPU 3", "GPUs 0, 3", or "all 8 GPUs" if `all_gpus` has 8 GPUs and all are meant."""
    if len(indices) == len(all_gpus) > 1:
        return f"all {len(indices)} GPUs"
    return f"GPU{'' if len(indices) == 1 else 's'} {', '.join(map(str, indices))}"


def gpus_option(indices: Sequence[int], all_gpus: Collection[object]) -> str:
    """Returns nvidia-smi's option that selects some GPUs: " -i 0,3", or "" for all of them."""
    return "" if len(indices) == len(all_gpus) else f" -i {','.join(map(str, indices))}"
