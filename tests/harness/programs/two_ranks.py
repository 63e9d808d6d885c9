"""Starts a program twice, as the two ranks of a job: torchrun without the seconds in which its agent imports torch."""

import os
import socket
import subprocess
import sys

with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    port = found.getsockname()[1]
job = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[1:]], env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
