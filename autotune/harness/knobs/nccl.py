"""Reads back the knobs of NCCL in every rank; they are environment variables that were set before the interpreter started.

NCCL does not report whether it uses them, so only the value in the process's environment can be verified.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Optional

from ..protocol import APPLIED, OVERRIDDEN, KnobReport, whole_number
from .base import KnobHandler

NAMES = (
    "algo", "proto", "min_nchannels", "max_nchannels", "nthreads", "buffsize", "p2p_level", "nvls", "ib_disable", "ib_hca",
    "socket_ifname", "cross_nic",
)  # fmt: skip
VARIABLES = {f"nccl.{name}": f"NCCL_{name.upper()}{'_ENABLE' if name == 'nvls' else ''}" for name in NAMES}
SWITCHES = ("nccl.nvls", "nccl.ib_disable")
NUMBERS = ("nccl.min_nchannels", "nccl.max_nchannels", "nccl.nthreads", "nccl.buffsize", "nccl.cross_nic")
# Knob key -> the value that leaves the variable unset, for knobs that have such a value.
UNSET = {key: 0 if key in NUMBERS else "auto" for key in VARIABLES if key not in (*SWITCHES, "nccl.cross_nic")}


class NcclKnobs(KnobHandler):
    """Verifies NCCL's variables."""

    keys = tuple(VARIABLES)

    def observe(self) -> Dict[str, Any]:
        """Returns knob key -> value, for the variables that are set in this process."""
        found = {key: _value(key, os.environ.get(name, "")) for key, name in VARIABLES.items()}
        return {key: value for key, value in found.items() if value is not None}

    def _verify(self, key: str, asked: Any) -> KnobReport:
        observed, name = self.observe().get(key), VARIABLES[key]
        if observed == (None if asked == UNSET.get(key) else asked):
            return KnobReport(APPLIED, "", observed)
        has = f"has {name}={os.environ[name]!r}" if observed is not None else f"has no {name}"
        return KnobReport(OVERRIDDEN, f"{asked!r} was requested, but the process {has}", observed)


def _value(key: str, text: str) -> Optional[Any]:
    """Returns the knob's value for a variable's text; None if the variable is not set."""
    if not text:
        return None
    if key in SWITCHES:
        return text != "0"
    number = whole_number(text) if key in NUMBERS else None
    return text if number is None else number
