"""Turns the documents of `autotune doctor`'s probes into findings, with pure functions."""

from __future__ import annotations

from autotune.machine.checks.data import check_data
from autotune.machine.checks.finding import Finding, Status
from autotune.machine.checks.gpus import check_gpus
from autotune.machine.checks.host import check_host
from autotune.machine.checks.network import check_connections
from autotune.machine.checks.software import check_program

__all__ = ["Finding", "Status", "check_connections", "check_data", "check_gpus", "check_host", "check_program"]
