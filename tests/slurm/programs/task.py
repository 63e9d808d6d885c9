"""Trains as a rank that srun has started. It reads its rank from Slurm's variables, after the import of torch."""

import os
import runpy
from pathlib import Path

import torch  # noqa: F401

PROGRAMS = Path(__file__).resolve().parents[2] / "faults" / "programs"
for name, of_slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
    os.environ.setdefault(name, os.environ[of_slurm])
if os.environ.get("FAULT") == "rank fails early" and os.environ["RANK"] == "1":
    raise ValueError("no data on this node")
if os.environ.get("FAULT") == "new files are seen late":  # as over NFS
    is_there = os.path.exists
    os.path.exists = lambda path: not str(path).endswith(".json") and is_there(path)
runpy.run_path(str(PROGRAMS / "ranks.py"), run_name="__main__")
