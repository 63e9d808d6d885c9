"""Simulated machines, one per seed. Each has thousands of configurations, and the true rate of each is known.

A machine is a program on a device. The formulas below give the times and bytes of a step and the cost of a start. Their
constants are drawn from ranges that published measurements make plausible. No machine copies a real one. The machines show how
a search copes with many knobs, scarce memory, compilations of minutes, failures and noise.

Use the seeds in DEVELOPMENT to develop a search. Use those in HELD_OUT only to judge it, and do not look at their constants.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune import stats
from autotune.records import Knobs, KnobValue, Outcome
from autotune.replay.space import Grid
from autotune.replay.table import Key, Measurement, Table, key_of
from autotune.replay.world import Use, World
from autotune.space import Choice, SearchSpace

DEVELOPMENT, HELD_OUT = range(12), range(100, 112)

BATCH, WORKERS, PREFETCH, PIN = "loader.batch_size", "loader.num_workers", "loader.prefetch_factor", "loader.pin_memory"
NON_BLOCKING, AMP, MATMUL, LAYOUT = "loader.non_blocking", "precision.amp", "precision.matmul", "layout.channels_last"
COMPILE, OPTIMIZER, BENCHMARK = "compile.mode", "optimizer.implementation", "backend.cudnn_benchmark"
SDPA, CHECKPOINTING, THREADS = "backend.sdpa", "memory.activation_checkpointing", "threads.intra"
BUCKETS, VIEW, SENT, STRATEGY = (
    "parallel.bucket_cap_mb", "parallel.gradient_as_bucket_view", "parallel.gradient_compression", "parallel.strategy",
)  # fmt: skip

GB = 1e9
SHARPNESS = 8.0  # how sharp the change from loader-bound to device-bound is
OVERLAP_LOSS = 0.12  # two overlapping phases take the longer one's time plus this fraction of the shorter one's
GRAPH_MODES = ("reduce-overhead", "max-autotune")
LAUNCH_S = 7e-6
FITS_FRAC = 0.985  # usable fraction of the memory, because allocators fragment it
NUM_BLOCKS, WINDOW_S, LEAST_STEPS, MOST_WINDOW_S = 30, 8.0, 20, 15.0
CACHED_FRAC = 0.2  # a compilation takes this fraction of its time if the same graphs were compiled before
TAIL_CHANCE = 0.03  # probability that a process is slow by accident


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of processor: its memory, bandwidths, compute capability, and sustained FLOP/s by number format."""

    memory_bytes: float
    bytes_per_s: float
    flops: Mapping[str, float]
    capability: tuple[int, int] | None
    link_bytes_per_s: float = 0.0  # between devices


DEVICES = {
    "V100": Device(
        memory_bytes=16 * GB,
        bytes_per_s=0.75e12,
        flops={"fp32": 11e12, "fp16": 55e12},
        capability=(7, 0),
        link_bytes_per_s=12e9,
    ),
    "A100": Device(
        memory_bytes=40 * GB,
        bytes_per_s=1.3e12,
        flops={"fp32": 15e12, "tf32": 70e12, "bf16": 150e12, "fp16": 150e12},
        capability=(8, 0),
        link_bytes_per_s=90e9,
    ),
    "H100": Device(
        memory_bytes=80 * GB,
        bytes_per_s=2.4e12,
        flops={"fp32": 40e12, "tf32": 200e12, "bf16": 380e12, "fp16": 380e12},
        capability=(9, 0),
        link_bytes_per_s=180e9,
    ),
    "CPU": Device(memory_bytes=64 * GB, bytes_per_s=0.1e12, flops={"fp32": 0.8e12, "bf16": 1.6e12}, capability=None),
}
KINDS = (
    ("A100", "conv", 1), ("H100", "transformer", 1), ("V100", "small", 1), ("CPU", "conv", 1), ("A100", "transformer", 4),
    ("H100", "conv", 4), ("V100", "transformer", 1), ("CPU", "transformer", 1), ("H100", "small", 1), ("V100", "conv", 4),
    ("A100", "small", 1), ("H100", "transformer", 4),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The true properties of a configuration.

    Attributes:
        rate: samples per second of all ranks; 0 if the configuration fails.
        device, loader: D (rate of the step alone) and L (rate of the loader alone) of all ranks, in samples per second.
        peak_frac: peak memory, as a fraction of a device's memory.
        fails: why it fails, apart from running out of memory; "" if it does not.
        start_s: seconds from launch to the first step, without compilation.
        compile_s: seconds of the first compilation.
    """

    rate: float
    device: float
    loader: float
    peak_frac: float
    fails: str
    start_s: float
    compile_s: float


@dataclass(kw_only=True)
class Machine:
    """A simulated machine and its program.

    Attributes:
        seed: the seed of its random constants.
        kind, family: the names of its device and of its kind of program.
        num_ranks: number of processes that train together, with one device each.
        num_cores: number of the host's cores.
        domains: knob -> values.
        reference: configuration of the unchanged program.
        made: the random constants.
    """

    seed: int
    kind: str = ""
    family: str = ""
    num_ranks: int = 1
    num_cores: int = 8
    domains: dict[str, list[Any]] = field(default_factory=dict)
    reference: Knobs = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = np.random.default_rng([self.seed, 20261124])
        self.kind, self.family, self.num_ranks = KINDS[self.seed % len(KINDS)]
        self.num_cores = int(draw.choice([8, 16, 32])) * (self.num_ranks if self.num_ranks > 1 else 1)
        self._draw_program(draw)
        self._draw_domains(draw)
        self._draw_memory(draw)
        self._draw_faults(draw)

    @property
    def name(self) -> str:
        """A name for tables, such as "A100-conv-0" or "H100x4-conv-5"."""
        ranks = f"x{self.num_ranks}" if self.num_ranks > 1 else ""
        return f"{self.kind}{ranks}-{self.family}-{self.seed}"

    @property
    def device(self) -> Device:
        """The machine's kind of processor."""
        return DEVICES[self.kind]

    @property
    def is_gpu(self) -> bool:
        """Whether the step computes on a GPU."""
        return self.kind != "CPU"

    @property
    def size(self) -> int:
        """Number of configurations, if the values of inactive knobs count, too."""
        return math.prod(len(values) for values in self.domains.values())

    # Drawing --------------------------------------------------------------------------------------------------------------

    def _draw_program(self, draw: np.random.Generator) -> None:
        made, is_gpu = self.made, self.is_gpu
        scale = {"conv": (9.8, 10.8), "transformer": (10.3, 11.6), "small": (6.5, 8.5)}[self.family]
        made["flop"] = 10 ** draw.uniform(*scale) * (1.0 if is_gpu else 0.05)  # FLOPs of a sample, forward and backward
        made["params"] = 10 ** draw.uniform(*{"conv": (7.2, 8.0), "transformer": (7.9, 9.0), "small": (5.5, 7.0)}[self.family])
        if not is_gpu:
            made["params"] *= 0.1
        made["half"] = draw.uniform(1, 12) if self.family != "small" else draw.uniform(30, 200)
        made["half_power"] = draw.uniform(0.3, 0.7)
        made["pointwise"] = draw.uniform(0.15, 0.55)  # share of a step's time, in fp32 at a large batch size
        made["kernels"] = 10 ** draw.uniform(*{"conv": (2.6, 3.1), "transformer": (2.8, 3.4), "small": (1.9, 2.4)}[self.family])
        made["host"] = draw.uniform(0.9, 2.5)  # slowness of Python
        made["layout"] = {"fp32": draw.uniform(0.85, 1.12), "amp": draw.uniform(1.05, 1.45)} if self.family == "conv" else {}
        made["benchmark"] = draw.uniform(1.0, 1.15) if self.family == "conv" else 1.0
        made["sdpa"] = {"flash": draw.uniform(0.95, 1.15), "mem_efficient": draw.uniform(0.85, 1.05)}
        made["fusing"] = draw.uniform(0.4, 0.8)  # compilation reduces pointwise time to this fraction
        made["tuned"] = draw.uniform(0.9, 1.0)  # max-autotune reduces arithmetic time to this fraction
        made["recompiling"] = draw.uniform(1.2, 1.6) if draw.random() < 0.15 else 1.0
        made["traced"] = draw.uniform(0.3, 0.7)  # compilation reduces launches to this fraction
        made["bf16"] = draw.uniform(0.6, 1.6)  # on a CPU: bf16's gain relative to the device's
        made["threads"] = draw.uniform(0.55, 0.95)
        made["fused"] = draw.uniform(0.5, 0.9)
        made["decode_s"] = 10 ** draw.uniform(-4.2, -2.3) if self.family != "small" else 10 ** draw.uniform(-5.2, -4)
        made["pass_s"], made["crowd"] = 10 ** draw.uniform(-4.2, -3.0), draw.uniform(0.05, 0.25)
        made["deep"] = draw.uniform(0.0, 0.03)
        made["sample_bytes"] = {"conv": 6e5, "transformer": 1.6e4, "small": 2e3}[self.family] * 10 ** draw.uniform(-0.3, 0.5)
        made["hidden"] = draw.uniform(0.4, 0.8)  # all-reduces can overlap with this share of the computation
        made["link"] = 10 ** draw.uniform(-0.7, 0.0)  # all-reduces reach this fraction of the link's bandwidth
        made["start_s"], made["compile_s"] = draw.uniform(7, 16), draw.uniform(25, 70)
        made["autotune_s"] = draw.uniform(70, 200)
        made["spread"] = draw.uniform(0.004, 0.02) if draw.random() < 0.75 else draw.uniform(0.025, 0.05)
        made["drift"], made["period"] = draw.uniform(0.0, 0.015), draw.uniform(8, 40)

    def _draw_domains(self, draw: np.random.Generator) -> None:
        own = int(draw.choice({"conv": [16, 32, 64], "transformer": [4, 8, 16], "small": [64, 128, 256]}[self.family]))
        if not self.is_gpu:
            own = max(4, own // 2)
        num_batches = 6 if self.is_gpu else 5
        cores = self.num_cores // self.num_ranks
        workers = [value for value in (0, 1, 2, 4, 8, 16) if value <= cores]
        domains: dict[str, list[Any]] = {BATCH: [max(1, own * 2**n // 2) for n in range(num_batches)], WORKERS: workers}
        formats = [name for name in ("bf16", "fp16") if name in self.device.flops]
        domains[AMP] = ["off", *(formats[:1] if draw.random() < 0.5 else formats)]
        modes = ["off", "default", "reduce-overhead", "max-autotune"] if self.is_gpu else ["off", "default", "max-autotune"]
        domains[COMPILE] = modes
        domains[OPTIMIZER] = ["default", "fused"] if draw.random() < 0.5 else ["default", "foreach", "fused"]
        if self.is_gpu:
            domains[PIN] = [False, True]
            if draw.random() < 0.5:
                domains[NON_BLOCKING] = [False, True]
        else:
            domains[THREADS] = sorted({cores, cores // 2, max(1, cores // 4)})
        if "tf32" in self.device.flops and draw.random() < 0.6:
            domains[MATMUL] = ["highest", "high"]
        if self.family == "conv":
            domains[LAYOUT] = [False, True]
            if self.is_gpu:
                domains[BENCHMARK] = [False, True]
        if self.family == "transformer" and self.is_gpu and self.device.capability != (7, 0):
            domains[SDPA] = ["default", "flash", "mem_efficient"]
        if self.family != "small":
            domains[CHECKPOINTING] = [False, True]
        if self.num_ranks > 1:
            domains[BUCKETS], domains[VIEW] = [5, 25, 100], [False, True]
            if draw.random() < 0.5:
                domains[SENT] = ["off", "bf16"]
        elif draw.random() < 0.4:
            domains[PREFETCH] = [2, 4, 8]
        self.domains = domains
        first: Knobs = {key: values[0] for key, values in domains.items()}
        some = [value for value in workers if 0 < value <= 4]
        first |= {BATCH: own, WORKERS: int(draw.choice([0, *some]))}
        first |= {key: value for key, value in {THREADS: cores, BUCKETS: 25}.items() if key in domains}
        self.reference = first

    def _draw_memory(self, draw: np.random.Generator) -> None:
        made = self.made
        made["bytes_amp"], made["bytes_compiled"] = draw.uniform(0.52, 0.72), draw.uniform(0.7, 0.97)
        made["bytes_again"], made["bytes_graphs"] = draw.uniform(0.2, 0.5), draw.uniform(0.02, 0.12)
        fixed = self._state_bytes(self.reference) + 0.6 * GB
        # The share of the remaining memory that the program's own batch takes. Small programs leave the device idle.
        share = 10 ** draw.uniform(-1.3, -0.25) if self.family != "small" else 10 ** draw.uniform(-2.5, -1.2)
        made["act_bytes"] = share * max(self.device.memory_bytes - fixed, 0.3 * self.device.memory_bytes)
        made["act_bytes"] /= float(self.reference[BATCH])

    def _draw_faults(self, draw: np.random.Generator) -> None:
        may_fail = [
            (key, value)
            for key in (COMPILE, OPTIMIZER, LAYOUT, SDPA, CHECKPOINTING)
            for value in self.domains.get(key, [])
            if value != self.reference.get(key)
        ]
        self.made["failing"] = []
        if draw.random() < 0.4:
            self.made["failing"].append([may_fail[int(draw.integers(len(may_fail)))]])
        if draw.random() < 0.3 and CHECKPOINTING in self.domains and len(self.domains[COMPILE]) > 2:
            self.made["failing"].append([(COMPILE, self.domains[COMPILE][2]), (CHECKPOINTING, True)])

    # Physics --------------------------------------------------------------------------------------------------------------

    def truth(self, knobs: Knobs) -> Truth:
        """Returns the true properties of a full configuration."""
        failing = [set(pairs) for pairs in self.made["failing"] if set(pairs) <= set(knobs.items())]
        fails = f"{' and '.join(key for key, _ in sorted(failing[0]))} cannot be used here" if failing else ""
        device, loader = self._device_rate(knobs), self._loader_rate(knobs)
        rate, peak_frac = self._rate(knobs, device, loader), self._peak_bytes(knobs) / self.device.memory_bytes
        mode = knobs[COMPILE]
        compile_s = 0.0 if mode == "off" else self.made["compile_s"]
        compile_s += {"reduce-overhead": 8.0, "max-autotune": self.made["autotune_s"]}.get(str(mode), 0.0)
        works = not fails and peak_frac <= FITS_FRAC
        return Truth(
            rate=self.num_ranks * rate if works else 0.0,
            device=self.num_ranks * device,
            loader=self.num_ranks * loader,
            peak_frac=peak_frac,
            fails=fails,
            start_s=self.made["start_s"] + 0.1 * int(knobs[WORKERS]),
            compile_s=compile_s,
        )

    def _device_rate(self, knobs: Knobs) -> float:
        """Returns D of one rank. A step takes the longer of computing and launching, plus the part that does not overlap."""
        made, batch, mode = self.made, float(knobs[BATCH]), str(knobs[COMPILE])
        is_amp, is_compiled = knobs[AMP] != "off", mode != "off"
        slow, flops = self.device.flops["fp32"], self._flops(knobs)
        half = made["half"] * (flops / slow) ** made["half_power"]
        arithmetic = made["flop"] * (batch + half) / flops
        if knobs.get(LAYOUT):
            arithmetic /= made["layout"]["amp" if is_amp else "fp32"]
        arithmetic /= made["benchmark"] if knobs.get(BENCHMARK) else 1.0
        arithmetic *= made["tuned"] if mode == "max-autotune" else 1.0
        arithmetic /= made["sdpa"].get(str(knobs.get(SDPA)), 1.0)
        share = made["pointwise"]
        pointwise = made["flop"] * (batch + 0.3 * made["half"]) / min(slow, 40e12) * share / (1 - share)
        pointwise *= (0.6 if is_amp else 1.0) * (made["fusing"] if is_compiled else 1.0)
        computing = arithmetic + pointwise
        computing *= 1.0 + (0.3 if knobs.get(CHECKPOINTING) else 0.0)
        computing *= made["recompiling"] if is_compiled else 1.0
        updating = 20 * made["params"] / self.device.bytes_per_s * (made["fused"] if knobs[OPTIMIZER] == "fused" else 1.0)
        if not self.is_gpu:
            cores = self.num_cores
            computing *= (cores / float(knobs[THREADS])) ** made["threads"]
            updating *= {"default": 1.6, "foreach": 1.5, "fused": 1.0}[str(knobs[OPTIMIZER])]
            launching = made["kernels"] * LAUNCH_S * made["host"] * (made["traced"] if is_compiled else 1.0)
            return batch / (computing + updating + launching)
        launches = 1.0 if not is_compiled else 0.05 if mode in GRAPH_MODES else made["traced"]
        launches += {"default": 0.12, "foreach": 0.12, "fused": 0.02}[str(knobs[OPTIMIZER])]
        launches += 0.35 if knobs.get(CHECKPOINTING) and mode not in GRAPH_MODES else 0.0
        launching = made["kernels"] * LAUNCH_S * made["host"] * launches
        busy = computing + updating + self._exposed_s(knobs, computing)
        step_s = max(busy, launching) + OVERLAP_LOSS * min(busy, launching)
        return batch / (step_s + self._copying_s(knobs))

    def _flops(self, knobs: Knobs) -> float:
        flops, amp = self.device.flops, str(knobs[AMP])
        if amp != "off":
            return flops["fp32"] * self.made["bf16"] * 1.6 if not self.is_gpu else flops[amp]
        return flops["tf32"] if knobs.get(MATMUL) == "high" else flops["fp32"]

    def _copying_s(self, knobs: Knobs) -> float:
        is_pinned = bool(knobs.get(PIN))
        hidden = 0.1 if is_pinned and knobs.get(NON_BLOCKING) else 1.0
        return float(knobs[BATCH]) * self.made["sample_bytes"] / (22e9 if is_pinned else 9e9) * hidden

    def _exposed_s(self, knobs: Knobs, computing: float) -> float:
        """Returns the seconds of the gradients' all-reduce that do not overlap with the backward pass."""
        if self.num_ranks == 1:
            return 0.0
        num, made = self.num_ranks, self.made
        gradient = 4 * made["params"] * (0.5 if knobs.get(SENT) == "bf16" else 1.0)
        bandwidth = self.device.link_bytes_per_s * made["link"]
        sending = 2 * (num - 1) / num * gradient / bandwidth
        bucket = min(float(knobs[BUCKETS]) * 2**20, gradient)
        last = 2 * (num - 1) / num * bucket / bandwidth
        calls = 4e-5 * gradient / bucket
        casting = 3 * 4 * made["params"] / self.device.bytes_per_s if knobs.get(SENT) == "bf16" else 0.0
        copying = 0.0 if knobs.get(VIEW) else 2 * 4 * made["params"] / self.device.bytes_per_s
        return max(last, sending + calls - made["hidden"] * computing) + casting + copying

    def _loader_rate(self, knobs: Knobs) -> float:
        """Returns L of one rank."""
        made, workers, cores = self.made, int(knobs[WORKERS]), self.num_cores / self.num_ranks
        if not workers:
            return float(1 / made["decode_s"])
        pinning = 1.1 if knobs.get(PIN) else 1.0
        passing = made["pass_s"] * pinning / float(knobs[BATCH])
        each = made["decode_s"] + passing
        crowd = 1 + made["crowd"] * max(0.0, workers - cores + 1) / cores
        deep = 1 - made["deep"] / (1.0 if int(knobs.get(PREFETCH, 2)) == 2 else float(knobs[PREFETCH]))
        return float(deep * min(workers, cores) / (each * crowd))

    def _rate(self, knobs: Knobs, device: float, loader: float) -> float:
        """Returns the rate of one rank."""
        workers = int(knobs[WORKERS])
        if not workers:
            return 1 / (1 / device + 1 / loader)
        rate = (device**-SHARPNESS + loader**-SHARPNESS) ** (-1 / SHARPNESS)
        if self.is_gpu:
            return float(rate)
        threads, cores = float(knobs[THREADS]), float(self.num_cores)
        needed = threads / device + min(workers, cores) / loader  # core-seconds per sample
        crowd = 1 - 0.05 * max(0.0, workers + threads - cores) / cores
        return float(min(rate, crowd * cores / needed))

    def _state_bytes(self, knobs: Knobs) -> float:
        """Returns the bytes of weights, gradients and optimizer: 16 per parameter, and 2 more for copies in 16 bits."""
        per = 16.0 + (2.0 if knobs[AMP] != "off" else 0.0) + (4.0 if knobs[OPTIMIZER] == "foreach" else 0.0)
        per += 4.0 if self.num_ranks > 1 and not knobs.get(VIEW) else 0.0
        return per * float(self.made["params"])

    def _peak_bytes(self, knobs: Knobs) -> float:
        made = self.made
        acts = made["act_bytes"] * float(knobs[BATCH])
        acts *= made["bytes_amp"] if knobs[AMP] != "off" else 1.0
        acts *= made["bytes_compiled"] if knobs[COMPILE] != "off" else 1.0
        acts *= made["bytes_again"] if knobs.get(CHECKPOINTING) else 1.0
        if knobs[COMPILE] in GRAPH_MODES:
            acts *= 1 + made["bytes_graphs"]
        fixed = 0.6 * GB if self.is_gpu else 1.0 * GB
        fixed += 0.3 * GB if knobs.get(BENCHMARK) else 0.0
        fixed += 0.0 if self.is_gpu else 0.05 * GB * int(knobs[WORKERS])
        return float(fixed + self._state_bytes(knobs) + acts)

    # As a table -----------------------------------------------------------------------------------------------------------

    def full(self, key: Key) -> Knobs:
        """Returns the full configuration of a key."""
        return {**self.reference, **{name: value for name, (_, value) in key}}

    def measurement(self, knobs: Knobs, *, factor: float, number: int, is_cached: bool, rng: random.Random) -> Measurement:
        """Returns the measurement of one trial.

        Args:
            knobs: full configuration.
            factor: the ratio of the measured to the true rate.
            number: number of the trial.
            is_cached: whether its graphs were compiled before.
            rng: random generator for the noise of the blocks.
        """
        truth = self.truth(knobs)
        changed = {key: value for key, value in knobs.items() if value != self.reference[key]}
        is_out = truth.peak_frac > FITS_FRAC
        compile_s = truth.compile_s * (CACHED_FRAC if is_cached else 1.0)
        start_s = truth.start_s + compile_s
        peak = int(min(truth.peak_frac, 1.0) * self.device.memory_bytes)
        kind = "cuda" if self.is_gpu else "cpu"
        ended = {"exit_code": 0, "cause": "result", "phase": "exit", "evidence": {"num_steps": 45, "is_harness_seen": True}}
        if truth.fails or is_out:
            error = (
                {"type": "RuntimeError", "message": truth.fails}
                if truth.fails
                else {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}
                if self.is_gpu
                else {"type": "MemoryError", "message": "no room"}
            )
            outcome = Outcome.error if truth.fails else Outcome.device_oom if self.is_gpu else Outcome.host_oom
            ended = {**ended, "exit_code": 1, "cause": "exit", "phase": "warmup"}
            results = [
                {
                    "rank": rank, "world_size": self.num_ranks, "status": "failed", "error": error,
                    "memory": {"kind": kind, "peak_bytes": peak},
                }
                for rank in range(self.num_ranks)
            ]  # fmt: skip
            return Measurement(
                number=number, round=1, changed=changed, outcome=outcome, seconds=start_s + 2.0, ended=ended, results=results
            )  # fmt: skip
        rate = truth.rate * factor
        step_s = float(knobs[BATCH]) / (rate / self.num_ranks)
        window_s = min(MOST_WINDOW_S, max(WINDOW_S, LEAST_STEPS * step_s))
        warmup_s = 2.0 + min(5 * step_s, 5.0)
        phases = {"spawn": 0.1, "import": 0.4 * truth.start_s, "init": 0.4 * truth.start_s, "first_batch": 0.2 * truth.start_s}
        phases |= {"compile": compile_s, "warmup": warmup_s, "steady": window_s}
        blocks = [rate / self.num_ranks * math.exp(rng.gauss(0.0, 0.006)) for _ in range(NUM_BLOCKS)]
        window = {
            "steps": max(1, round(window_s / step_s)), "seconds": window_s, "samples": rate / self.num_ranks * window_s,
            "rate_per_s": rate / self.num_ranks, "block_rates_per_s": blocks, "block_s": [window_s / NUM_BLOCKS] * NUM_BLOCKS,
            "half_width_frac": 0.01, "is_steady": True, "reason": "interval narrow enough",
        }  # fmt: skip
        workers = int(knobs[WORKERS])
        is_shared = not self.is_gpu and workers > 0 and float(knobs[THREADS]) + workers > self.num_cores
        near = [math.exp(rng.gauss(0.0, 0.01)) for _ in range(2)]
        result: dict[str, Any] = {
            "world_size": self.num_ranks, "status": "measured", "unit": "samples",
            "memory": {"kind": kind, "peak_bytes": peak}, "phases_s": phases, "throughput_per_s": rate / self.num_ranks,
            "window": window, "regime": "" if not workers else "shared" if is_shared else "separate",
            "device_rate_per_s": None if is_shared else truth.device / self.num_ranks * factor * near[0],
            "loader_rate_per_s": truth.loader / self.num_ranks * near[1],
            "knobs": {key: {"status": "applied", "observed": value} for key, value in changed.items()},
            "loss": {"first": 1.0, "last": 0.5, "is_finite": True, "curve": [1.0, 0.8, 0.5]},
        }  # fmt: skip
        if not changed:
            facts = {"torch": "2.14.1", "device": "cuda" if self.is_gpu else "cpu", "has_compiler": True}
            facts |= {"device_name": self.kind, "compute_capability": list(self.device.capability or ())} if self.is_gpu else {}
            facts |= {} if self.is_gpu else {"isa": ["avx2", "avx512_bf16", "amx_bf16"]}
            result |= {"facts": facts, "observed": dict(self.reference)}
        return Measurement(
            number=number,
            round=1,
            changed=changed,
            outcome=Outcome.ok,
            seconds=start_s + warmup_s + window_s + 1.0,
            value=rate,
            ended=ended,
            results=[{"rank": rank, **result} for rank in range(self.num_ranks)],
        )

    def table(self) -> Table:
        """Returns a table with only the baseline. A `SimulatedWorld` provides the other measurements."""
        gpu = {"name": self.kind, "memory_bytes": int(self.device.memory_bytes)}
        host = {
            "num_cores": self.num_cores,
            "memory_bytes": int(128 * GB if self.is_gpu else self.device.memory_bytes),
            "isa": ["avx2", "avx512_bf16", "amx_bf16"],
            "has_compiler": True, "gpus": [gpu] * self.num_ranks if self.is_gpu else [],
        }  # fmt: skip
        domains = {key: {"choice": values} for key, values in self.domains.items()}
        first = self.measurement(self.reference, factor=1.0, number=0, is_cached=False, rng=random.Random(self.seed))
        return Table(
            workload=self.name, machine=host, versions={}, asked=domains, pinned={}, placeholders={}, is_recipe=True,
            settings={}, objective="throughput", unit="samples", baseline=self.reference, reference=self.reference,
            space=domains, memory_bytes=int(self.device.memory_bytes), repeats=1, is_whole=False, recorded_on="2026-11-24",
            measurements=[first],
        )  # fmt: skip

    def grid(self) -> Grid:
        """Returns the search space. It lists no keys, because every configuration can be measured."""
        domains: dict[str, Any] = {key: Choice(tuple(values)) for key, values in self.domains.items()}
        return Grid(space=SearchSpace(domains=domains, pinned={}, is_held=False), keys=frozenset())


@functools.cache
def machine(seed: int) -> Machine:
    """Returns the machine with this seed."""
    return Machine(seed=seed)


@functools.cache
def ranked(seed: int) -> list[tuple[float, Knobs]]:
    """Returns (rate, knobs) for every configuration that works on a machine, the fastest first."""
    one = machine(seed)
    points = (dict(zip(one.domains, point, strict=True)) for point in itertools.product(*one.domains.values()))
    found = [(one.truth(knobs).rate, knobs) for knobs in points]
    return sorted((pair for pair in found if pair[0]), key=lambda pair: -pair[0])


class SimulatedWorld(World):
    """A machine during one search, with noise between trials and slow drift.

    It replaces `autotune.replay.world.World`, but the true rates are known, so it holds out no repeats.

    Attributes:
        optimum: the fastest configuration that works.
        serves: the purpose of the measurements that it returns now.
        best_tried: the largest true rate of the configurations that the search has tried, as a fraction of the optimum's.

    Args:
        machine: the machine.
        seed: the seed of noise and drift.
    """

    def __init__(self, machine: Machine, *, seed: int) -> None:
        self.machine, self.serves, self.best_tried = machine, Use.search, 0.0
        self._rng = random.Random(f"simulated {machine.seed} {seed}")
        self._phase, self._num_served = self._rng.uniform(0, 2 * math.pi), 0
        self._compiled: set[tuple[KnobValue | None, ...]] = set()
        self.best_rate, best = ranked(machine.seed)[0]
        self.optimum = self._key(best)

    def serve(self, key: Key) -> Measurement:
        """Runs another trial of a configuration; returns its measurement."""
        knobs = self.machine.full(key)
        self.best_tried = max(self.best_tried, self.fraction(key)) if self.serves is Use.search else self.best_tried
        self._num_served += 1
        graphs = tuple(knobs.get(name) for name in (COMPILE, BATCH, AMP, LAYOUT, CHECKPOINTING, SDPA, MATMUL))
        is_cached = graphs in self._compiled
        self._compiled.add(graphs)
        return self.machine.measurement(
            knobs, factor=self._factor(), number=self._num_served, is_cached=is_cached, rng=self._rng
        )

    def another(self, key: Key) -> Measurement:
        """Does the same as `serve`."""
        return self.serve(key)

    def _factor(self) -> float:
        made = self.machine.made
        drift = made["drift"] * math.sin(self._phase + 2 * math.pi * self._num_served / made["period"])
        tail = math.log(self._rng.uniform(0.8, 0.95)) if self._rng.random() < TAIL_CHANCE else 0.0
        return math.exp(self._rng.gauss(0.0, made["spread"]) + drift + tail)

    def truth(self, key: Key, *_: Use) -> float:
        """Returns the true rate of a configuration; 0 if it does not work."""
        return self.machine.truth(self.machine.full(key)).rate

    def held_out(self, key: Key) -> float:
        """Returns the true rate, because nothing is held out."""
        return self.truth(key)

    def fraction(self, key: Key, *_: Use) -> float:
        """Returns a configuration's true rate as a fraction of the optimum's."""
        return self.truth(key) / self.best_rate

    def final_fraction(self, key: Key) -> float:
        """Does the same as `fraction`."""
        return self.fraction(key)

    def needless(self, changed: Knobs) -> list[str]:
        """Returns the changed knobs that gain at most MARGIN_FRAC."""
        whole = self.truth(key_of(changed))
        rest = {knob: key_of({other: value for other, value in changed.items() if other != knob}) for knob in changed}
        without = {knob: self.truth(key) for knob, key in rest.items()}
        return [knob for knob, rate in without.items() if rate and whole <= rate * (1 + stats.MARGIN_FRAC)]

    def _key(self, knobs: Knobs) -> Key:
        return key_of({name: value for name, value in knobs.items() if value != self.machine.reference[name]})
