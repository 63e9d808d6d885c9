"""Tables made by a formula, so that the true value of every figure is known."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from autotune.records import Knobs, Outcome
from autotune.replay.table import Measurement, Table

REFERENCE: Knobs = {
    "loader.batch_size": 32, "loader.num_workers": 0, "precision.amp": "off", "layout.channels_last": False,
}  # fmt: skip
DOMAINS: dict[str, list[Any]] = {
    "loader.batch_size": [8, 32, 128],
    "loader.num_workers": [0, 1, 2],
    "precision.amp": ["off", "bf16"],
    "layout.channels_last": [False, True],
}
BEST: Knobs = {"loader.batch_size": 128, "loader.num_workers": 2, "precision.amp": "bf16", "layout.channels_last": True}
MACHINE = {
    "num_cores": 4, "memory_bytes": 16 * 2**30, "isa": ["avx2", "amx_bf16"], "has_compiler": True, "gpus": [],
}  # fmt: skip
OK_S, OOM_S, WINDOW_S = 17.0, 6.0, 8.0


def rate_of(knobs: Knobs) -> float:
    """Returns the true rate of a configuration, from the rates of a device and a loader that wait for each other."""
    batch, workers = float(knobs["loader.batch_size"]), int(knobs["loader.num_workers"])
    device = 60 * batch / (batch + 16)
    device *= (1.8 if knobs["precision.amp"] == "bf16" else 1.0) * (1.3 if knobs["layout.channels_last"] else 1.0)
    loader = 40.0 * max(1, workers)
    return (device**-8 + loader**-8) ** (-1 / 8) if workers else 1 / (1 / device + 1 / loader)


def make_table(*, noise_frac: float = 0.0, repeats: int = 3, has_oom: bool = True, seed: int = 0) -> Table:
    """Returns a table of all 36 configurations. With `has_oom`, a batch of 128 without bf16 runs out of memory."""
    rng, measurements = random.Random(seed), []
    points = [dict(zip(DOMAINS, point, strict=True)) for point in itertools.product(*DOMAINS.values())]
    points.sort(key=lambda knobs: knobs != REFERENCE)  # the baseline first
    for round_number in range(1, repeats + 1):
        for knobs in points:
            is_oom = has_oom and knobs["loader.batch_size"] == 128 and knobs["precision.amp"] == "off"
            rate = rate_of(knobs) * math.exp(rng.gauss(0.0, noise_frac))
            measurements.append(_measurement(len(measurements), round_number, knobs, None if is_oom else rate, rng))
    domains = {key: {"choice": values} for key, values in DOMAINS.items()}
    return Table(
        workload="formula", machine=MACHINE, versions={}, asked=domains, pinned={}, placeholders={}, is_recipe=False,
        settings={}, objective="throughput", unit="samples", baseline=REFERENCE, reference=REFERENCE, space=domains,
        memory_bytes=1_500_000_000, repeats=repeats, is_whole=True, recorded_on="2026-11-22", measurements=measurements,
    )  # fmt: skip


def _measurement(number: int, round_number: int, knobs: Knobs, rate: float | None, rng: random.Random) -> Measurement:
    changed = {key: value for key, value in knobs.items() if value != REFERENCE[key]}
    result: dict[str, Any] = {
        "rank": 0, "world_size": 1, "status": "measured", "unit": "samples", "memory": {"kind": "cpu", "peak_bytes": 10**7},
        "phases_s": {"spawn": 0.1, "import": 3.0, "init": 1.0, "first_batch": 1.0, "warmup": 3.0, "steady": WINDOW_S},
        "knobs": {key: {"status": "applied", "observed": value} for key, value in changed.items()},
        "loss": {"first": 1.0, "last": 0.5, "is_finite": True, "curve": [1.0, 0.8, 0.5]},
    }  # fmt: skip
    result["memory"]["peak_bytes"] *= int(knobs["loader.batch_size"])
    if number == 0:
        result |= {"facts": {"torch": "2.14.1", "device": "cpu", "isa": ["avx2", "amx_bf16"]}, "observed": dict(REFERENCE)}
    if rate is None:
        result |= {"status": "failed", "error": {"type": "MemoryError", "message": "no room"}}
    else:
        result |= {"throughput_per_s": rate, "window": _window(rate, rng)}
    return Measurement(
        number=number,
        round=round_number,
        changed=changed,
        outcome=Outcome.host_oom if rate is None else Outcome.ok,
        seconds=OOM_S if rate is None else OK_S,
        value=rate,
        ended={"exit_code": 0, "cause": "result", "phase": "exit", "evidence": {"num_steps": 45, "is_harness_seen": True}},
        results=[result],
    )


def _window(rate: float, rng: random.Random) -> dict[str, Any]:
    blocks = [rate * math.exp(rng.gauss(0.0, 0.005)) for _ in range(40)]
    return {
        "steps": 40, "seconds": WINDOW_S, "samples": rate * WINDOW_S, "rate_per_s": rate, "block_rates_per_s": blocks,
        "block_s": [WINDOW_S / 40] * 40, "half_width_frac": 0.01, "is_steady": True, "reason": "interval narrow enough",
    }  # fmt: skip
