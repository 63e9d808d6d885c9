"""Counts samples by a stopwatch: a training script's own rate, printed once at the end."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

SKIP_S, SKIP_STEPS = 2.0, 5  # of training before the stopwatch starts, whichever is longer


def options() -> argparse.Namespace:
    """Returns what the command line says: where data lie and for how long to train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data, and of what is written")
    parser.add_argument("--seconds", type=float, help="of the stopwatch; without: until the epochs are over")
    parser.add_argument("--epochs", type=int, default=100_000)
    return parser.parse_args()


def revision(name: str) -> int:
    """Returns which revision of a part of the script is asked for in the environment; 1 if none is."""
    return int(os.environ.get(f"REVISION_{name}", "1"))


class Meter:
    """The stopwatch of a loop: `if meter.add(len(batch)): break`."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds if os.environ.get("RANK", "0") == "0" else None  # the first rank's time ends the others
        self.num_steps = self.samples = 0
        self.begun_s = self.started_s = 0.0

    def add(self, samples: int) -> bool:
        """Counts a step and returns whether the time is over; prints the rate then."""
        if self.seconds is None:
            return False
        now_s = time.perf_counter()
        self.num_steps += 1
        if not self.begun_s:
            self.begun_s = now_s
        if not self.started_s:
            if self.num_steps > SKIP_STEPS and now_s - self.begun_s >= SKIP_S:
                self.started_s, self.num_steps = now_s, 0
            return False
        self.samples += samples
        elapsed_s = now_s - self.started_s
        if elapsed_s < self.seconds:
            return False
        print(json.dumps({"rate_per_s": self.samples / elapsed_s, "steps": self.num_steps, "seconds": elapsed_s}), flush=True)
        return True
