"""Runs autotune, but waits only seconds instead of minutes for an agent's first message."""

import sys

from autotune.cli.main import main
from autotune.launchers import slurm

slurm.BEGIN_S = 4.0
if __name__ == "__main__":
    sys.exit(main())
