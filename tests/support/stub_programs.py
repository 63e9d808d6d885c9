"""Small programs for testing launchers: they follow the protocol by hand and need neither torch nor the harness."""

from __future__ import annotations

import sys

# Runs in any Python and writes the harness's files. `result()` writes its document atomically, as the harness does.
PRELUDE = """
import json, os, signal, subprocess, sys, time
spec = json.load(open(os.environ["AUTOTUNE_SPEC"], encoding="utf-8"))
folder = os.path.dirname(os.environ["AUTOTUNE_SPEC"])

def progress(phase, step=0):
    line = json.dumps({"time_s": time.monotonic(), "phase": phase, "step": step, "rate_per_s": None})
    with open(os.path.join(folder, "progress.jsonl"), "a") as file:
        file.write(line + "\\n")

def result(rank=0, world_size=1, status="measured", **more):
    window = {"steps": 20, "seconds": 2.0, "samples": 640.0, "rate_per_s": 320.0, "block_rates_per_s": [320.0] * 5,
              "half_width_frac": 0.01, "is_steady": True, "reason": "interval narrow enough"}
    document = {"trial": spec["trial"], "nonce": spec["nonce"], "rank": rank, "world_size": world_size, "pid": os.getpid(),
                "status": status, "window": window if status == "measured" else None,
                "throughput_per_s": 320.0 if status == "measured" else None, "steps": {"end_s": [0.1] * 20}, "schema": 1}
    document["knobs"] = {key: {"status": "applied"} for key in [*spec["knobs"], *spec["passed"]]}
    document.update(more)
    path = os.path.join(folder, "result.rank%d.json" % rank)
    with open(path + ".tmp", "w") as file:
        json.dump(document, file)
    os.replace(path + ".tmp", path)

def spawn(code, **how):
    return subprocess.Popen([sys.executable, "-S", "-c", code], **how)
"""

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
SLEEP = "open('pid', 'w').write(str(os.getpid())); os.rename('pid', folder + '/pid'); time.sleep(600)"  # after PRELUDE


def program(body: str) -> list[str]:
    """Returns the command that runs `body` after PRELUDE."""
    return [sys.executable, "-S", "-c", f"{PRELUDE}\n{body}"]
