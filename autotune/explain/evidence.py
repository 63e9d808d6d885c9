"""Collects everything known about one configuration: the input of the rules in `findings`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.explain import host_tables
from autotune.explain.breakdown import COLLECTIVES, D2D, D2H, H2D, SYNC
from autotune.explain.gains import LEAST_GAIN, Gain, Kind, gain_of
from autotune.explain.kernel_names import converts_layout
from autotune.explain.roofline import TF32
from autotune.explain.tables import MAX_DISTORTION, Tables
from autotune.explain.trials import Tried
from autotune.harness.explain.documents import BACKWARD, FORWARD, INPUT, MAIN, Line, Lines, Memory, Site
from autotune.harness.protocol import SHARED
from autotune.knobs.base import HostContext
from autotune.quantities import percent_text, step_time_text
from autotune.ranks import LOADER
from autotune.records import KnobValue, TrialRecord

GENERATED = "torchinductor_"  # part of the paths of code that torch.compile generates


def phases_of(lines: Lines) -> dict[str, float]:
    """Returns phase -> seconds per step, timed on the GPU if the program uses one, else in the training thread.

    The training thread runs ahead of a GPU, so the phase in which it waits is often not the phase that the GPU is executing.
    """
    return lines.phases_s if lines.device_phases_s is None else lines.device_phases_s


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operators of a step in one rank's trace.

    Attributes:
        count: calls of operators in a step, including calls from inside other operators, but not in the phase "input".
        by_operator: rows of the table of operators, longest first, with a key "seconds" added: seconds per step on the GPU if
            the program uses one, else on the host.
        busy_s: seconds per step in which the GPU computes; None without a GPU.
        communicating_s: seconds per step in which the GPU computes nothing, but runs a collective, even if the collective only
            waits for other ranks; 0 without a GPU.
        copying_s: seconds per step in which the GPU neither computes nor communicates, but copies or fills memory; 0 without a
            GPU.
        uploading_s: the part of `copying_s` in which the GPU copies from the host; 0 without a GPU.
        waited_for_s: seconds per step in which the GPU is idle while the host is inside a call that waits for the GPU (category
            "synchronise"); 0 without a GPU.
        layout_s: seconds per step in kernels that only convert images between layouts; 0 without a GPU.
        is_tf32: whether most float32 products are rounded to TF32, on Tensor Cores.
        is_distorted: whether the profiler slowed the host so much that the operators' seconds do not hold for a step without
            it; False on a GPU, whose seconds a profiler does not change.
    """

    count: float
    by_operator: list[dict[str, Any]] = field(default_factory=list)
    busy_s: float | None = None
    communicating_s: float = 0.0
    copying_s: float = 0.0
    uploading_s: float = 0.0
    waited_for_s: float = 0.0
    layout_s: float = 0.0
    is_tf32: bool = False
    is_distorted: bool = False


def operations_of(tables: Tables) -> list[Operations]:
    """Returns the operators in the traces, by rank; [] without a trace."""
    return [_operations_of(tables, rank) for rank in sorted({int(row["rank"]) for row in tables.rows("operators")})]


def _operations_of(tables: Tables, rank: int) -> Operations:
    operators = tables.rows("operators", rank)
    has_device = any(row["device_self_s"] for row in operators)
    key = "device_self_s" if has_device else "host_self_s"
    seconds = {row["category"]: row["seconds"] for row in tables.rows("breakdown", rank)} if has_device else {}
    compute_s = math.fsum(each for category, each in seconds.items() if "compute" in category)
    return Operations(
        count=math.fsum(row["count"] for row in operators if row["phase"] != INPUT),
        by_operator=sorted(({**row, "seconds": row[key] or 0.0} for row in operators), key=lambda row: -row["seconds"]),
        busy_s=compute_s if has_device else None,
        communicating_s=seconds.get(COLLECTIVES, 0.0),
        copying_s=math.fsum(seconds.get(category, 0.0) for category in (D2H, D2D, H2D)),
        uploading_s=seconds.get(H2D, 0.0),
        waited_for_s=seconds.get(SYNC, 0.0),
        layout_s=math.fsum(row["total_s"] for row in tables.rows("kernels", rank) if converts_layout(row["kernel"])),
        is_tf32=any(row["dtype"] == TF32 for row in tables.rows("roofline", rank)),
        is_distorted=not has_device and tables.distortion.get(rank, 1.0) > MAX_DISTORTION,
    )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything known about one configuration.

    Attributes:
        record: the trial that first measured the configuration.
        cwd: folder of the program; paths inside are shown relative to it.
        host_context: machine and program.
        lines, memory: documents of the passes "lines" and "memory", by rank; () for a pass that wrote none.
        operations: operators in the traces, by rank; () without a trace.
        domains: knob key -> values that the study may set.
        tried: effects of settings according to the study's trials; None without a study.
    """

    record: TrialRecord
    cwd: str = ""
    host_context: HostContext
    lines: Sequence[Lines] = ()
    memory: Sequence[Memory] = ()
    operations: Sequence[Operations] = ()
    domains: Mapping[str, Sequence[KnobValue]] = field(default_factory=dict)
    tried: Tried | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether the program trains on a CUDA device."""
        return self.host_context.has_cuda

    @property
    def first(self) -> Lines:
        """The document of rank 0's pass "lines"; valid only if there is one."""
        return self.lines[0]

    @property
    def phases_s(self) -> dict[str, float]:
        """Phase -> seconds of a step on rank 0, see `phases_of`."""
        return phases_of(self.first)

    @property
    def step_s(self) -> float:
        """Seconds of a step under the pass "lines"."""
        return self.first.seconds / max(1, self.first.steps)

    @property
    def samples(self) -> float:
        """Samples of a step over all ranks, counted as in a trial's rate: a batch that several ranks share counts once.

        A rank without a document is assumed to have as many samples as the other ranks have on average.
        """
        known = [one.samples / max(1, one.steps) for one in self.lines]
        if not known:
            return 0.0
        first, *others = self.lines
        is_sent_out = first.unit_source == LOADER and all(one.unit_source != LOADER for one in others)
        if others and (is_sent_out or first.ranks_per_batch == first.world_size):
            return known[0]
        return math.fsum(known) * max(1.0, first.world_size / len(known)) / max(1, first.ranks_per_batch)

    def _step_at_s(self, rate_per_s: float | None) -> float | None:
        """Converts a rate of the trial into seconds per step; None without a rate, or if the pass counts in another unit."""
        return self.samples / rate_per_s if self.lines and rate_per_s and self.record.unit == self.first.unit else None

    @property
    def trial_step_s(self) -> float:
        """Seconds of a step in the trial, where no pass slows it down; under the pass "lines" if the trial has no rate."""
        return self._step_at_s(self.record.value) or self.step_s

    @property
    def busy_s(self) -> float:
        """Seconds of a step without its wait for input, at most the seconds of a step at the device rate if that is known."""
        busy_s = max(self.step_s - self.wait_s, 0.0)
        return min(busy_s, self._step_at_s(self.record.device_rate) or busy_s)

    @property
    def communicating_s(self) -> float:
        """Seconds of a step in which a GPU waits for collectives themselves rather than for slower ranks; 0 if unknown.

        A rank that is ahead of others waits for them inside a collective. So the rank with the fewest seconds in collectives
        shows best what the collectives themselves cost.
        """
        return min((one.communicating_s for one in self.operations), default=0.0)

    @property
    def copying_s(self) -> float:
        """Seconds of a step in which a GPU only copies or fills memory, on the rank with the fewest; 0 if unknown."""
        return min((one.copying_s for one in self.operations), default=0.0)

    @property
    def alone_s(self) -> float | None:
        """Seconds of `busy_s` that would remain if no loader worker used the training thread's cores; None if unknown.

        Outside its wait for input, the training thread of a CPU program computes whenever it has a core. So `busy_s` minus the
        thread's CPU seconds is the time in which the thread waited for a core.
        """
        if self.is_cuda or self.first.busy_cpu_s is None:
            return None
        return min(self.busy_s, self.first.busy_cpu_s)

    @property
    def slowdown(self) -> float | None:
        """Duration of a step under the pass "lines", divided by the duration of a step in the trial; None if unknown."""
        plain_s = self._step_at_s(self.record.value)
        return self.step_s / plain_s if plain_s else None

    @property
    def input_s(self) -> float:
        """Seconds of a step in the phase "input", of all loaders, as shown in the step's breakdown."""
        return self.phases_s.get(INPUT, 0.0)

    @property
    def wait_s(self) -> float:
        """Seconds of `input_s` in the training loader: waiting for its workers or, without workers, doing their work."""
        return self.input_s if self.first.wait_s is None else min(self.first.wait_s, self.input_s)

    def gain(self, saved_s: Iterable[float], kind: Kind) -> Gain:
        """Returns the gain of a change that saves these seconds of a step: at least, probably, at most."""
        return gain_of(self.step_s, saved_s, kind)

    def of_step(self, seconds: float) -> str:
        """Returns a part of a step in words: "20.0 ms of a step's 102 ms (20 %)"."""
        share = percent_text(seconds / self.step_s)
        return f"{step_time_text(seconds)} of a step's {step_time_text(self.step_s)} ({share})"

    def shown(self, file: str) -> str:
        """Returns a file's path, relative to the program's folder if it lies there."""
        return file.removeprefix(os.path.join(self.cwd, "") if self.cwd else "")

    def place(self, file: str, line: int) -> str:
        """Returns "file:line", with the path as `shown` returns it."""
        return f"{self.shown(file)}:{line}"

    def place_of(self, line: Line | Site) -> str:
        """Returns the place of a line."""
        return self.place(line.file, line.line)

    @property
    def batch(self) -> float:
        """Samples of one batch of rank 0's loader."""
        lines = self.first
        return float(lines.batch_size or lines.samples / max(1, lines.steps))

    @property
    def made(self) -> float:
        """Samples that rank 0's loader makes for a step, as in `host_tables.made`."""
        return host_tables.made(self.first)

    @property
    def num_workers(self) -> int:
        """Worker processes of the training loader."""
        if self.first.num_workers is not None:
            return self.first.num_workers
        return int(self.record.knobs.get("loader.num_workers") or 0)

    @property
    def is_shared(self) -> bool:
        """Whether loader workers and steps share the CPU's cores."""
        if self.record.regime:
            return self.record.regime == SHARED
        return not self.is_cuda and self.num_workers > 0

    @property
    def model_place(self) -> str:
        """Place of the program's own line that takes the most time in forward and backward; "forward" if there is none."""
        own = [line for line in self.own_lines() if line.phase in (FORWARD, BACKWARD)]
        return self.place_of(own[0]) if own else "forward"

    def own_lines(self, where: str = MAIN) -> list[Line]:
        """Returns rank 0's lines of the program's own code in MAIN (the training thread) or WORKER, most seconds first."""
        found = [line for line in self.first.lines if line.is_own and line.where == where and GENERATED not in line.file]
        return sorted(found, key=lambda line: -line.self_s)

    @property
    def edited_at(self) -> float:
        """Latest modification time of the program's files that occur in these passes, seconds since the epoch; 0 if unknown."""
        files = {line.file for one in self.lines for line in one.lines if line.is_own}
        times = [0.0]
        for file in files | {stage.file for one in self.lines for stage in one.stages if stage.file}:
            with contextlib.suppress(OSError):  # the file is gone, or on another machine
                times.append(os.path.getmtime(file))
        return max(times)

    def value(self, knob: str) -> KnobValue | None:
        """Returns a knob's value in this configuration; None if unknown."""
        return self.record.knobs.get(knob)

    def may_set(self, knob: str, value: KnobValue) -> bool:
        """Returns whether a knob can be set to this value, is not set to it already, and trials have not refuted the value."""
        is_blocked = knob in self.host_context.not_applicable or self.value(knob) == value
        return not is_blocked and value in self.domains.get(knob, ()) and not self.is_refuted(knob, value)

    def remedy(self, knob: str, value: KnobValue, code: str) -> dict[str, Any]:
        """Returns the fields of a finding's remedy: the setting if `may_set`, else `code`, a text on what to change."""
        return {"knob": knob, "value": value} if self.may_set(knob, value) else {"code": code}

    def effect(self, knob: str, value: KnobValue) -> Gain | None:
        """Returns the gain of setting one more knob, according to the study's trials; None if they do not show it."""
        return self.tried.gain(knob, value) if self.tried else None

    def is_refuted(self, knob: str, value: KnobValue | None) -> bool:
        """Returns whether the study's trials with this value failed or were no faster, see `Tried.is_refuted`."""
        return self.tried is not None and self.tried.is_refuted(knob, value)

    def larger(self, knob: str, now: float, wanted: float) -> int | None:
        """Returns a larger value of a knob to try; None if there is none.

        It is the value that gains most according to the study's trials. If they show no gain, it is the smallest untried value
        that is at least `wanted`, or the largest untried value if all are below `wanted`.
        """
        values = [int(value) for value in self.domains.get(knob, ()) if int(value) > now and self.may_set(knob, value)]
        known = {value: gain.mid for value in values if (gain := self.effect(knob, value))}
        best = max(known, key=lambda value: known[value], default=None)
        if best is not None and known[best] >= LEAST_GAIN:
            return best
        untried = [value for value in values if value not in known] or values
        return min(untried, key=lambda value: (value < wanted, abs(value - wanted)), default=None)
