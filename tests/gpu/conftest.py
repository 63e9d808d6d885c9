"""Tests that need a CUDA device. Without one, each test is skipped and names what it could not check.

`python -m pytest tests/gpu` runs them, and so does stage `smoke` of `python -m tests.benchmarks.gpu_campaign`, which saves what
they record. The test process itself never uses the device. It starts a process for each measurement.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.config.compose import Composed, compose
from autotune.harness.protocol import MeasureRules
from autotune.knobs.catalogue import knob
from autotune.launchers.local import LocalLauncher
from autotune.machine.gpus import gpus
from autotune.monitors.nvml import DeviceMonitor, open_device
from autotune.records import Knobs
from tests.benchmarks.rivals import PROGRAM
from tests.benchmarks.trials import Bench, Measured

RULES = MeasureRules(warmup_min_device_s=0.3, warmup_max_s=20.0, min_s=0.5, max_s=2.0, slow_max_s=4.0, promoted_max_s=2.0)
SMALL = ("model=resnet18", "model.image_size=64", "model.num_classes=10")
WARM = ("torch", "torchvision")
# Allocates the given MiB on the device, prints "there", and computes until it is killed.
HOLDER = """
import sys, torch
held = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")
a = torch.randn(4096, 4096, device="cuda")
torch.cuda.synchronize()
print("there", flush=True)
while True:
    for _ in range(20):
        a = (a @ a).clamp(-1, 1)
    torch.cuda.synchronize()
"""


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    if not gpus():
        pytest.skip(f"no CUDA device: not known here: {request.module.__doc__.strip().splitlines()[0]}")


class Trials:
    """Trials of one program, with warm starts where possible. The baseline is measured first."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.baseline = bench.measure({}, RULES)
        assert self.baseline.rate_per_s, f"{self.baseline.outcome}: {self.baseline.reason}"
        assert self.baseline.result
        assert self.baseline.result.memory["kind"] == "cuda", "it trained on the CPU"

    def measure(self, knobs: Knobs, *, rules: MeasureRules = RULES, is_fresh: bool = False) -> Measured:
        """Measures a configuration."""
        is_fresh = is_fresh or any(knob(key).needs_fresh_start(value) for key, value in knobs.items())
        return self.bench.measure(knobs, rules, warm=() if is_fresh else WARM)

    def works(self, knobs: Knobs, **options: Any) -> Measured:
        """Measures a configuration; checks that all its knobs took effect, that it trained, and that its loss is finite."""
        measured = self.measure(knobs, **options)
        assert measured.rate_per_s, f"{measured.outcome}: {measured.reason}"
        assert not measured.not_applied
        assert measured.result
        assert measured.result.loss is None or measured.result.loss["is_finite"]
        return measured


Make = Callable[..., Trials]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Composed, dict[str, Any]], Trials]]:
    """Returns a function that makes the trials of a program. Tests of a file with the same program share its trials."""
    with contextlib.ExitStack() as open_ones:
        there: dict[str, Trials] = {}

        def make(composed: Composed, options: dict[str, Any]) -> Trials:
            key = repr((composed.command.parts, options))
            if key not in there:
                launcher = LocalLauncher()
                open_ones.callback(launcher.close)
                folder = tmp_path_factory.mktemp("study") / "trials"
                there[key] = Trials(Bench(composed.command, launcher, folder, **options))
            return there[key]

        yield make


@pytest.fixture(scope="module")
def recipe(made: Callable[[Composed, dict[str, Any]], Trials]) -> Make:
    """Returns a function that makes the trials of a recipe."""
    return lambda *overrides, **options: made(compose(list(overrides), command=None), options)


@pytest.fixture(scope="module")
def program(made: Callable[[Composed, dict[str, Any]], Trials]) -> Make:
    """Returns a function that makes the trials of a script; the default is tests/benchmarks/image_program.py."""

    def make(*words: str, file: Path = PROGRAM, **options: Any) -> Trials:
        return made(compose([], command=[sys.executable, str(file), *words]), options)

    return make


@pytest.fixture
def monitor() -> Iterator[DeviceMonitor]:
    """The NVML monitor of the first device."""
    opened = open_device()
    yield opened
    opened.close()


@pytest.fixture
def holder() -> Callable[[int], Any]:
    """Returns a context manager. Within it, another process holds the given MiB of the device and computes."""

    @contextlib.contextmanager
    def holding(mib: int) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(mib)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout
            assert process.stdout.readline().strip() == "there"
            yield process
        finally:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()

    return holding
