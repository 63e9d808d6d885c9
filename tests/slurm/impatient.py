"""Is autotune, except that it waits for an agent's first message for a few seconds instead of minutes."""

import sys

from autotune.cli.main import main
from autotune.launchers import slurm

slurm.BEGIN_S = 4.0
if __name__ == "__main__":
    sys.exit(main())
