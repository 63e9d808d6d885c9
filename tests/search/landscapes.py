"""Made-up training programs to search on, drawn at random from plausible ranges.

The rates of some programs follow from D (the rate of the step alone), L (the rate of the loader alone) and memory, as the
search assumes. The other programs break that assumption. These programs show that a search works as intended, but not how good
it is on real programs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune.records import Knobs
from tests.support.fake_launcher import Surface

GPU_FACTS = {"torch": "2.14.1", "device": "cuda", "device_name": "Fake GPU", "compute_capability": [9, 0], "has_compiler": True}
AMP, LAYOUT, COMPILE, FUSED = "precision.amp", "layout.channels_last", "compile.mode", "optimizer.implementation"
BATCH, WORKERS, PREFETCH, THREADS = "loader.batch_size", "loader.num_workers", "loader.prefetch_factor", "threads.intra"


@dataclass(kw_only=True)
class Landscape(Surface):
    """A made-up program whose step time, loader time and memory are random.

    Attributes:
        seed: the seed of the program's random constants.
        num_cores: number of the machine's cores.
        is_gpu: whether the step computes on a GPU; otherwise it shares the cores with the loader's workers.
        breaks: standard deviation, in logarithms of the rate, of pairwise effects that neither D nor L shows; 0 for none.
        fill_frac: fraction of the memory that a batch of 128 in 16 bits takes; None if memory is never short.
        made: the random constants.
    """

    seed: int = 0
    num_cores: int = 2
    is_gpu: bool = False
    breaks: float = 0.0
    fill_frac: float | None = None
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        r = np.random.default_rng([self.seed, self.is_gpu])
        made = self.made
        made["sample_s"] = 10 ** r.uniform(-4.0, -2.5) if self.is_gpu else 10 ** r.uniform(-2.6, -1.4)
        made["launch_s"] = 10 ** r.uniform(-2.6, -1.7) if self.is_gpu else 10 ** r.uniform(-3, -1.8)
        made["half"] = r.uniform(4, 96) if self.is_gpu else r.uniform(0.5, 12)
        made["cache"] = r.uniform(0, 0.06)  # fraction of the rate lost with each doubling of the batch size beyond 32 on a CPU
        made["amp"] = r.uniform(1.0, 3.2) if self.is_gpu else r.uniform(0.8, 2.4)
        made["layout"] = {"off": r.uniform(0.85, 1.1), "bf16": r.uniform(0.95, 1.5)}
        made["compile"] = {
            "off": (1.0, 1.0),
            "default": (r.uniform(0.9, 1.35), r.uniform(0.35, 0.8)),
            "reduce-overhead": (r.uniform(0.97, 1.35), r.uniform(0.05, 0.3)),
            "max-autotune": (r.uniform(1.0, 1.45), r.uniform(0.05, 0.4)),
        }
        made["fused"] = {"default": 1.0, "foreach": r.uniform(0.97, 1.1), "fused": r.uniform(0.98, 1.12)}
        made["bench"], made["matmul"] = r.uniform(0.99, 1.12), r.uniform(1.0, 1.8)
        made["threads"] = r.uniform(0.5, 0.95)  # exponent with which the rate scales with the step's threads
        made["decode_s"] = 10 ** r.uniform(-4, -2.2) if self.is_gpu else made["sample_s"] * 10 ** r.uniform(-1.6, 0.3)
        made["pass_s"], made["copy_s"] = 10 ** r.uniform(-4, -2.7), 10 ** r.uniform(-5.5, -4.2)
        made["start"], made["act"] = r.uniform(0.05, 0.3), 10 ** r.uniform(-3.3, -2.2)
        made["amp_bytes"] = r.uniform(0.5, 0.75)
        made["pairs"], made["rng"] = {}, np.random.default_rng([self.seed, 7])
        self.noise_frac = float(r.uniform(0.005, 0.02)) if self.is_gpu else float(r.uniform(0.01, 0.03))
        self.start_s, self.window_s, self.compile_s = 8.0 if self.is_gpu else 4.0, 4.0, 40.0
        if self.is_gpu:
            self.facts = dict(GPU_FACTS)
        if self.fill_frac is not None:
            self.capacity_bytes = int(self.peak_bytes({BATCH: 128, AMP: "bf16"}) / self.fill_frac)
        self.observed = {**self.observed, THREADS: self.num_cores, "threads.omp": self.num_cores}

    def step_of_s(self, knobs: Knobs) -> float:
        """Returns the seconds of a step behind a loader that takes no time."""
        made, batch, amp = self.made, float(knobs[BATCH]), str(knobs.get(AMP, "off"))
        gain, launch = made["compile"][knobs.get(COMPILE, "off")]
        gain *= made["amp"] if amp != "off" else made["matmul"] if knobs.get("precision.matmul") == "high" else 1.0
        gain *= made["layout"]["bf16" if amp != "off" else "off"] if knobs.get(LAYOUT) else 1.0
        gain *= made["bench"] if knobs.get("backend.cudnn_benchmark") else 1.0
        if not self.is_gpu:
            gain *= (float(knobs.get(THREADS, self.num_cores)) / self.num_cores) ** made["threads"]
            gain *= 1 - made["cache"] * max(0.0, math.log2(batch / 32))
        fused = made["fused"][knobs.get(FUSED, "default")]
        busy = made["sample_s"] * (batch + made["half"]) / gain
        starts = made["launch_s"] * launch / fused
        together = max(busy, starts) + 0.15 * min(busy, starts) if self.is_gpu else busy + starts
        copy = made["copy_s"] * batch * (0.15 if knobs.get("loader.pin_memory") else 1.0) if self.is_gpu else 0.0
        return together + copy

    def device_per_s(self, knobs: Knobs) -> float:
        """Returns D, in samples per second."""
        return float(knobs[BATCH]) / self.step_of_s(knobs)

    def loader_rate_per_s(self, knobs: Knobs) -> float:
        """Returns L, in samples per second."""
        made, workers = self.made, int(knobs.get(WORKERS, 0))
        if not workers:
            return 1 / made["decode_s"]
        passing = made["pass_s"] / math.sqrt(float(knobs[BATCH]))
        deep = 1.0 if int(knobs.get(PREFETCH, 2)) > 2 else 0.985
        return deep / max(made["decode_s"] / min(workers, self.num_cores), passing)

    def rate_per_s(self, knobs: Knobs) -> float:
        """Returns the true rate."""
        device, loader, workers = self.device_per_s(knobs), self.loader_rate_per_s(knobs), int(knobs.get(WORKERS, 0))
        if not workers:
            rate = 1 / (1 / device + 1 / loader)
        else:
            rate = (device**-8 + loader**-8) ** (-1 / 8)
            if not self.is_gpu:  # too many processes cost a little extra
                threads, crowd = float(knobs.get(THREADS, self.num_cores)), 1.0
                busy = threads / device + min(workers, self.num_cores) / loader
                crowd = 1 - 0.05 * max(0.0, workers + threads - self.num_cores) / self.num_cores
                rate = min(rate, crowd * self.num_cores / busy)
            elif workers > self.num_cores:
                rate *= 1 - 0.1 * (workers - self.num_cores) / self.num_cores
        return rate * math.exp(self._broken(knobs))

    def _broken(self, knobs: Knobs) -> float:
        if not self.breaks:
            return 0.0
        total = 0.0
        for one, other in itertools.combinations(sorted(knobs.items()), 2):
            name = f"{one}{other}"
            if name not in self.made["pairs"]:
                drawn = np.random.default_rng([self.seed, *name.encode()])
                self.made["pairs"][name] = drawn.normal(0, self.breaks) if drawn.random() < 0.15 else 0.0
            total += self.made["pairs"][name]
        return total

    def regime(self, knobs: Knobs) -> str:
        """Returns "shared" if workers and step together need more cores than the machine has."""
        workers = int(knobs.get(WORKERS, 0))
        if not workers:
            return ""
        if self.is_gpu:
            return "separate"
        asked = float(knobs.get(THREADS, self.num_cores)) + workers * min(
            1.0, self.rate_per_s(knobs) / self.loader_rate_per_s(knobs)
        )
        return "shared" if asked > 1.05 * self.num_cores else "separate"

    def peak_bytes(self, knobs: Knobs) -> int:
        """Returns M, the peak memory."""
        made = self.made
        bytes_of = made["act"] * (made["amp_bytes"] if knobs.get(AMP, "off") != "off" else 1.0)
        return int(1e9 * (made["start"] + bytes_of * float(knobs[BATCH])) * 0.2)
