"""A launcher without processes, for tests: results come from a synthetic surface with noise, failures and costs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotune.clock import Clock
from autotune.errors import NoNode
from autotune.harness.explain.documents import document_file
from autotune.harness.protocol import APPLIED, KnobReport, Progress, RankResult, Window, result_file, write_json
from autotune.launchers.base import Cause, Ended, Launch, Launcher, Running, Slot
from autotune.monitors.nvml import NoDevice
from autotune.records import Knobs

PASS_S = 5.0  # length of a pass of `autotune explain`
NUM_BLOCKS = 40  # blocks in a window, as many as fit into two seconds

DEFAULTS: Knobs = {
    "loader.batch_size": 32,
    "loader.num_workers": 0,
    "loader.pin_memory": False,
    "loader.persistent_workers": False,
    "precision.amp": "off",
    "precision.matmul": "highest",
    "layout.channels_last": False,
    "compile.mode": "off",
    "optimizer.implementation": "default",
    "threads.intra": 2,
    "threads.omp": 2,
}


@dataclass(kw_only=True)
class Surface:
    """How fast a made-up program is, and how long measuring it takes.

    Attributes:
        gains: (knob key, value) -> factor on the device rate.
        observed: the program's own knob values, as a harness would observe them.
        base_per_s: device rate of the unchanged program, samples per second.
        loader_per_s: loader rate with zero or one worker; each further worker adds the same rate.
        half_batch: batch size at which half of the device's full rate is reached.
        noise_frac: spread of the rate between processes; the spread between blocks is a third of it.
        max_batch: larger batches run out of memory.
        capacity_bytes: memory of the device; configurations that need more run out of memory, too.
        start_s: from launch to the window.
        spared_s: how much of `start_s` a warm start saves; `facts` must say that the program allows warm starts.
        window_s: maximum length of the window.
        cycles: number of whole cycles in a window; 0 for a program whose steps have no cycle.
        leave_s: from the end of the window to the exit of the last process.
        stop_s: how long stopping a trial takes.
        compile_s: how long compiling takes the first time; with the study's cache it takes half.
        extra_start_s: (knob key, value) -> seconds that it adds to the start.
        power_w: returns the device's power in a configuration; None for a machine without a GPU.
        step_s: returns the step time in a configuration; None for 0.1 s always.
        num_samples: length of the data set; None if unknown.
        batches_per_step: batches that the program uses in a step; None if unknown.
        applicability: knobs that this program does not allow -> reasons.
        facts: what the program's process reports about itself and its device.
        losses: called with (knobs, seed), where seed may be None; returns the losses of the first steps, [] if none were seen.
        failures: called with (trial, knobs); returns how the trial fails, or None.
        documents: called with (pass, knobs); returns the documents that a pass of `autotune explain` writes.
        files_left: files that each trial leaves in the working directory, name -> bytes.
        files_aside: for each attempt, in the order of their starts, the user's files that it changes -> the copies.
        beside: called with the largest number of trials that ran at the same time; returns the factor on the rate.
        on_slot: called with the name of a trial's slot, "" for none; returns the factor on the rate, 0 if it fails there.
        no_node: called with a slot's name; returns "" if it has a node, else why not, or the error if it will never have one.
        without: called with the stages of the loader that a trial skips; returns the factor on the rate.
    """

    gains: dict[tuple[str, Any], float] = field(default_factory=dict)
    observed: Knobs = field(default_factory=lambda: dict(DEFAULTS))
    base_per_s: float = 60.0
    loader_per_s: float = 200.0
    half_batch: float = 8.0
    noise_frac: float = 0.01
    max_batch: int = 10_000
    capacity_bytes: int = 10**9
    start_s: float = 4.0
    spared_s: float = 0.0
    window_s: float = 8.0
    cycles: int = 0
    leave_s: float = 0.0
    stop_s: float = 0.0
    compile_s: float = 50.0
    extra_start_s: dict[tuple[str, Any], float] = field(default_factory=dict)
    power_w: Callable[[Knobs], float] | None = None
    step_s: Callable[[Knobs], float] | None = None
    num_samples: int | None = None
    batches_per_step: float | None = None
    applicability: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(
        default_factory=lambda: {"torch": "2.14.1", "device": "cpu", "isa": ["avx2", "amx_bf16"], "has_compiler": True}
    )
    losses: Callable[[Knobs, int | None], list[float | None]] = lambda _, __: []
    failures: Callable[[int, Knobs], Failure | None] = lambda _, __: None
    documents: Callable[[str, Knobs], list[Any]] = lambda _, __: []
    files_left: dict[str, int] = field(default_factory=dict)
    files_aside: list[dict[str, str]] = field(default_factory=list)
    beside: Callable[[int], float] = lambda _: 1.0
    on_slot: Callable[[str], float] = lambda _: 1.0
    no_node: Callable[[str], str | NoNode] = lambda _: ""
    without: Callable[[list[str]], float] = lambda _: 1.0

    def rate_per_s(self, knobs: Knobs) -> float:
        """Returns the true rate of a configuration, samples per second."""
        device, loader = self.device_per_s(knobs), self.loader_rate_per_s(knobs)
        if not knobs.get("loader.num_workers"):
            return 1 / (1 / device + 1 / loader)
        return float((device**-8 + loader**-8) ** (-1 / 8))

    def device_per_s(self, knobs: Knobs) -> float:
        """Returns the device rate D, samples per second."""
        batch = float(knobs.get("loader.batch_size", 32))
        rate = self.base_per_s * (batch / (batch + self.half_batch)) / (32 / (32 + self.half_batch))
        for key, value in knobs.items():
            rate *= self.gains.get((key, value), 1.0)
        return rate

    def peak_bytes(self, knobs: Knobs) -> int:
        """Returns the peak memory M, bytes."""
        return 10**6 * int(knobs["loader.batch_size"])

    def is_out_of_memory(self, knobs: Knobs) -> bool:
        """Returns whether a configuration runs out of memory."""
        return int(knobs["loader.batch_size"]) > self.max_batch or self.peak_bytes(knobs) > self.capacity_bytes

    def regime(self, knobs: Knobs) -> str:
        """Returns the regime of the loader's workers: "separate" with workers, "" without; never "shared" here."""
        return "separate" if knobs.get("loader.num_workers") else ""

    def start_of_s(self, knobs: Knobs) -> float:
        """Returns the seconds from launch to the window, without compiling."""
        return self.start_s + sum(self.extra_start_s.get((key, value), 0.0) for key, value in knobs.items())

    def loader_rate_per_s(self, knobs: Knobs) -> float:
        """Returns the loader rate L, samples per second."""
        return self.loader_per_s * max(1, int(knobs.get("loader.num_workers", 0)))


@dataclass(kw_only=True)
class Failure:
    """How a trial goes wrong.

    Attributes:
        error: exception in the form of a rank result; None if there was no exception.
        signal: name of the signal that ended the program; None if no signal ended it.
        cause: as in `Ended`.
        log_tail: end of its log.
        knob_reports: knob key -> the report to give instead of "applied".
        num_steps: number of steps before the failure.
        is_unsteady: the trial gives a number but reaches no steady state.
        hang: kind of hang that is reported; "" for none.
        raises: exception that `poll` raises once, halfway through the trial, such as KeyboardInterrupt.
    """

    error: dict[str, str] | None = None
    signal: str | None = None
    cause: Cause = "result"
    log_tail: str = ""
    knob_reports: dict[str, KnobReport] = field(default_factory=dict)
    num_steps: int = 3
    is_unsteady: bool = False
    hang: str = ""
    raises: type[BaseException] | None = None


BROKEN = Failure(signal="SIGABRT", cause="exit", log_tail="terminate called\n  what():  CUDA error: unknown error")
OUT_OF_MEMORY = Failure(error={"type": "torch.OutOfMemoryError", "message": "CUDA out of memory.", "traceback": "..."})


class FakeLauncher(Launcher):
    """Takes its results from a surface; time passes only on the given clock.

    Attributes:
        launches: every launch, in order.
        running: the running trials; never more than one, unless each has a slot.
        is_closed: whether `close` was called.
    """

    def __init__(
        self, surface: Surface, clock: Clock, *, seed: int = 0, num_slots: int = 1, slots_per_host: int | None = None
    ) -> None:
        self.surface, self.clock = surface, clock
        self.launches: list[Launch] = []
        self.running: list[FakeRunning] = []
        self.is_closed = False
        each = slots_per_host or num_slots
        self._slots = [_FakeSlot(self, str(n + 1), f"fake{n // each or ''}") for n in range(num_slots if num_slots > 1 else 0)]
        self._random = random.Random(seed)
        self._compiled: set[Any] = set()

    def start(self, launch: Launch) -> Running:
        """Starts no process; the result is ready once enough time has passed on the clock."""
        assert not self.running, "two trials at once disturb each other"
        return self.begin(launch)

    def beside(self) -> list[Launcher]:
        """Returns the launchers of the slots."""
        return list(self._slots)

    def begin(self, launch: Launch, slot: str = "") -> FakeRunning:
        """Starts a trial on a slot, or on the whole machine."""
        self.launches.append(launch)
        launch.folder.mkdir(parents=True, exist_ok=True)
        write_json(str(launch.folder / "spec.json"), launch.spec)
        self.running.append(begun := FakeRunning(self, launch, slot))
        for running in self.running:
            running.most_at_once = max(running.most_at_once, len(self.running))
        return begun

    def close(self) -> None:
        """Sets `is_closed`."""
        self.is_closed = True

    def knobs_of(self, launch: Launch) -> Knobs:
        """Returns the full configuration of a launch: the program's own values, overridden by the requested ones."""
        return {**self.surface.observed, **launch.spec.passed, **launch.spec.knobs}

    def compiles_for_s(self, knobs: Knobs) -> float:
        """Returns how long compiling takes now: half as long if this mode was compiled before, as with the study's cache."""
        mode = knobs.get("compile.mode")
        is_cached = mode in self._compiled
        self._compiled.add(mode)
        return self.surface.compile_s * (0.5 if is_cached else 1.0)

    def noise(self, frac: float) -> float:
        """Returns a random factor around 1."""
        return self._random.lognormvariate(0.0, frac)


class _FakeSlot(Launcher):
    """Starts trials on one slot of a fake machine, one at a time."""

    def __init__(self, whole: FakeLauncher, name: str, host: str) -> None:
        self._whole, self.clock = whole, whole.clock
        self.slot = Slot(name=name, host=host, gpus=(), cores=(), facts={})
        self._running: Running | None = None

    def start(self, launch: Launch) -> Running:
        assert self._running is None or self._running.poll() is not None, "two trials at once on one slot"
        self._running = _FakeWaiting(self, launch) if self.why_waiting() else self.begin(launch)
        return self._running

    def begin(self, launch: Launch) -> FakeRunning:
        """Starts a trial on the slot's node."""
        return self._whole.begin(launch, self.slot.name)

    def why_waiting(self) -> str:
        return str(self._whole.surface.no_node(self.slot.name))


class _FakeWaiting(Running):
    """A trial that waits for the node of its slot, and then runs there."""

    def __init__(self, slot: _FakeSlot, launch: Launch) -> None:
        self._slot, self._launch = slot, launch
        self._running: FakeRunning | None = None
        self._ended: Ended | None = None

    def poll(self) -> Ended | None:
        if self._running or self._ended:
            return self._running.poll() if self._running else self._ended
        why = self._slot._whole.surface.no_node(self._slot.slot.name)
        if isinstance(why, NoNode):
            self.stop(str(why))
            raise why
        self._running = None if why else self._slot.begin(self._launch)
        return None

    def progress(self) -> Progress | None:
        return self._running.progress() if self._running else None

    def stop(self, reason: str) -> None:
        if self._running:
            self._running.stop(reason)
        self._ended = self._ended or Ended.stopped(reason, phase="spawn", seconds=0.0)


class MadeUpDevice(NoDevice):
    """A GPU whose power comes from the launcher's surface."""

    def __init__(self, launcher: FakeLauncher) -> None:
        self._launcher = launcher

    def metrics(self) -> dict[str, float]:
        """Returns the power in the configuration of the last launch."""
        surface, launches = self._launcher.surface, self._launcher.launches
        if not launches or surface.power_w is None:
            return {}
        return {"gpu.power_w": surface.power_w(self._launcher.knobs_of(launches[-1]))}


class FakeRunning(Running):
    """A trial of a fake launcher."""

    def __init__(self, launcher: FakeLauncher, launch: Launch, slot: str = "") -> None:
        self._launcher, self._launch, self.most_at_once, self._on_slot = launcher, launch, 1, launcher.surface.on_slot(slot)
        self._knobs = launcher.knobs_of(launch)
        surface = launcher.surface
        self._failure = surface.failures(launch.spec.trial, self._knobs)
        if self._failure is None and not self._on_slot:
            self._failure = BROKEN
        if self._failure is None and surface.is_out_of_memory(self._knobs):
            self._failure = OUT_OF_MEMORY
        is_compiled = self._knobs.get("compile.mode", "off") != "off"
        self._compile_s = launcher.compiles_for_s(self._knobs) if is_compiled else 0.0
        self._spared_s = surface.spared_s if launch.warm else 0.0
        self._start_s = surface.start_of_s(self._knobs) - self._spared_s
        is_measured, limit_per_s = launch.spec.mode == "measure", launch.spec.race_below_per_s
        self._is_raced = is_measured and limit_per_s is not None and self._rate() < limit_per_s
        longest_s = launch.spec.rules.max_s if is_measured else launch.spec.max_s or (PASS_S if launch.spec.explain else 1.0)
        self._window_s = launch.spec.rules.race_min_s if self._is_raced else min(surface.window_s, longest_s)
        self._begun = launcher.clock.monotonic()
        opened_s = self._start_s + self._compile_s
        if self._until_end_s() >= opened_s + launch.spec.rules.race_min_s:
            self._window_s = min(self._window_s, self._until_end_s() - opened_s)
        self._ended: Ended | None = None
        self._stop_reason = ""

    def poll(self) -> Ended | None:
        """See `Running.poll`."""
        if self._ended is not None:
            return self._ended
        passed_s = self._launcher.clock.monotonic() - self._begun
        if self._failure and self._failure.raises and passed_s > self._due_s() / 2:
            raises, self._failure = self._failure.raises, None
            raise raises
        limit_s = self._launch.deadlines.total_s
        if passed_s >= min(self._due_s(), limit_s):
            self._finish("deadline" if limit_s < self._due_s() else None, passed_s)
        return self._ended

    def progress(self) -> Progress | None:
        """Returns a step of the window, whatever the time."""
        return Progress(time_s=self._launcher.clock.monotonic(), phase="steady", step=3, rate_per_s=self._rate())

    def stop(self, reason: str) -> None:
        """See `Running.stop`."""
        if self._ended is None:
            self._stop_reason = reason
            self._launcher.clock.sleep(self._launcher.surface.stop_s)
            self._finish("stopped", self._launcher.clock.monotonic() - self._begun)

    def _due_s(self) -> float:
        if self._failure and not self._failure.is_unsteady:
            return self._start_s
        return self._start_s + self._compile_s + self._window_s + self._launcher.surface.leave_s

    def _until_end_s(self) -> float:
        """Returns the seconds from launch until the window must be over, by the spec's `end_s`."""
        end_s = self._launch.spec.end_s
        return math.inf if end_s is None else end_s - self._begun

    def _rate(self) -> float:
        return self._launcher.surface.rate_per_s(self._knobs)

    def _finish(self, cause: Cause | None, seconds: float) -> None:
        self._launcher.running.remove(self)
        failure = self._failure
        cause = cause or (failure.cause if failure else "result")
        has_answer = cause == "result" and not (failure and failure.signal)
        results = [self._result()] if has_answer else []
        for result in results:
            write_json(str(self._launch.folder / result_file(0)), result)
        evidence = {
            "log_tail": failure.log_tail if failure else "",
            "is_harness_seen": True,
            "num_steps": failure.num_steps if failure else 3,
            "stop_reason": self._stop_reason,
            "files_left": dict(self._launcher.surface.files_left),
            "files_aside": self._launcher.surface.files_aside.pop(0) if self._launcher.surface.files_aside else {},
            **({"hang": {"kind": failure.hang, "summary": f"{failure.hang}: made up"}} if failure and failure.hang else {}),
            "deadline": f"total: not over within {self._launch.deadlines.total_s:.0f} s" if cause == "deadline" else "",
        }
        self._ended = Ended(
            exit_code=0 if has_answer else None,
            signal=failure.signal if failure else None,
            cause=cause,
            phase="steady",
            results=results,
            problems=[],
            seconds=seconds,
            evidence=evidence,
            start="warm" if self._launch.warm else "fresh",
            spared_s=self._spared_s,
        )

    def _result(self) -> RankResult:
        spec, surface, failure = self._launch.spec, self._launcher.surface, self._failure
        asked = {**spec.knobs, **spec.passed}
        reports = {key: KnobReport(status=APPLIED, observed=value) for key, value in asked.items()}
        result = RankResult(trial=spec.trial, nonce=spec.nonce, rank=0, world_size=1, pid=1, status="measured", unit="samples")
        result.knobs = {**reports, **(failure.knob_reports if failure else {})}
        result.observed, result.applicability = dict(surface.observed), dict(surface.applicability)
        result.detected = {"loader": {"num_samples": surface.num_samples}, "batches_per_step": surface.batches_per_step}
        result.facts, result.target = dict(surface.facts), [{"site": "train.py:1", "ordinal": 0}]
        result.phases_s = {"spawn": 0.1, "import": self._start_s - 0.1, "compile": self._compile_s, "steady": self._window_s}
        result.memory = {
            "kind": "cpu",
            "peak_bytes": surface.peak_bytes(self._knobs),
            "capacity_bytes": surface.capacity_bytes,
        }
        if curve := surface.losses(self._knobs, spec.seed):
            curve, is_finite = curve[: spec.max_steps or 64], None not in (curve[0], curve[-1])
            result.loss = {"first": curve[0], "last": curve[-1], "is_finite": is_finite, "curve": curve}
        if failure and failure.error:
            result.status, result.error = "failed", failure.error
        elif spec.mode == "explain":
            for document in surface.documents(spec.explain, self._knobs):
                write_json(str(self._launch.folder / document_file(spec.explain, document.rank)), document)
        elif spec.mode == "measure":
            self._measure(result, is_steady=not (failure and failure.is_unsteady))
        return result

    def _measure(self, result: RankResult, *, is_steady: bool) -> None:
        surface, noise = self._launcher.surface, self._launcher.noise
        rate = self._rate() * noise(surface.noise_frac) * surface.beside(self.most_at_once)
        rate *= self._on_slot
        rate *= surface.without(self._launch.spec.skipped)
        blocks = [rate * noise(surface.noise_frac / 3) for _ in range(NUM_BLOCKS)]
        result.throughput_per_s = sum(blocks) / NUM_BLOCKS
        result.window = Window(
            steps=40,
            seconds=self._window_s,
            samples=rate * self._window_s,
            rate_per_s=result.throughput_per_s,
            block_rates_per_s=blocks,
            half_width_frac=0.02,
            is_steady=is_steady,
            reason="" if is_steady else "memory was still moving",
            is_raced=self._is_raced,
            cycles=surface.cycles,
        )
        device_per_s = surface.device_per_s(self._knobs)
        result.regime = surface.regime(self._knobs)
        result.device_rate_per_s = None if result.regime == "shared" else device_per_s * noise(surface.noise_frac)
        result.loader_rate_per_s = surface.loader_rate_per_s(self._knobs) * noise(surface.noise_frac)
        result.data_wait_frac = max(0.0, 1 - self._rate() / device_per_s)
        step_s = surface.step_s(self._knobs) if surface.step_s else 0.1
        result.steps = {"end_s": [step_s * n for n in range(50)], "samples": [32] * 50, "wait_s": [0.0] * 50, "warmup": 5}
