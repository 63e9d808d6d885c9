"""Runs what a GPU must show, stage by stage; what is done is not run again.

    python -m tests.benchmarks.gpu_campaign [--stage smoke] --out FOLDER

FOLDER gets `<stage>.json` and `<stage>.md`. Without a CUDA device the rest is run and what stays unknown is named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autotune.machine import host_facts
from tests.benchmarks.gpu_campaign import smoke
from tests.benchmarks.gpu_campaign.checks import FAILED, run_stage

STAGES = {"smoke": smoke.CHECKS}


def main() -> int:
    """Runs the named stages; returns 1 when a check failed."""
    parser = argparse.ArgumentParser(description="what a GPU must show")
    parser.add_argument("--stage", choices=STAGES, action="append", help="default: all, in order")
    parser.add_argument("--out", type=Path, required=True, help="folder of the findings")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    has_cuda = bool(host_facts()["gpus"])
    findings = [
        finding
        for stage in options.stage or STAGES
        for finding in run_stage(stage, STAGES[stage], options.out.resolve(), has_cuda=has_cuda)
    ]
    return 1 if any(finding.status == FAILED for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
