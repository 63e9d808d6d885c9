"""Names its server and its account's mode in the environment, before it imports the libraries that read them there.

Then it starts another process, as programs start their ranks.
"""

import os
import subprocess
import sys

os.environ.update(MLFLOW_TRACKING_URI="http://127.0.0.1:9", WANDB_MODE="online")
import wandb
from mlflow.tracking._tracking_service import utils

print(wandb.init().settings.mode, wandb.init(mode="disabled").settings.mode, utils._resolve_tracking_uri(), flush=True)
if "rank" not in sys.argv:
    subprocess.run([sys.executable, __file__, "rank"], check=True)
