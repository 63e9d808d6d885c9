"""Defines what is known of one configuration: what the rules of `findings` look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.explain.gains import Gain
from autotune.harness.explain.documents import INPUT, MAIN, Line, Lines, Memory
from autotune.harness.protocol import SHARED
from autotune.knobs.base import HostContext
from autotune.records import KnobValue, TrialRecord

GENERATED = "torchinductor_"  # part of the paths of code that torch.compile wrote
Effect = Callable[[str, KnobValue], Gain | None]


def nothing_known(_: str, __: KnobValue) -> Gain | None:
    """Returns None. Stands for `Evidence.effect` if no trial says what a knob's value would gain."""
    return None


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What the trace says of the operators of a step, for one rank.

    Attributes:
        count: calls of operators in a step, including those by other operators.
        by_operator: [{"operator", "kind", "phase", "count", "seconds", "bound", "roofline_frac"}] a step, as in the table of
            operators, the most seconds first. The seconds are the GPU's if the program trains on one, else the host's.
        busy_s: seconds a step that the device computes; None on the CPU.
        is_distorted: whether the profiler slowed the step so much that its shares are not those of the plain program.
    """

    count: float
    by_operator: list[dict[str, Any]] = field(default_factory=list)
    busy_s: float | None = None
    is_distorted: bool = False


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of one configuration.

    Attributes:
        record: the trial that measured it first.
        cwd: folder of the program; places in it are named relative to it.
        host_context: machine and program.
        lines, memory: documents of these passes, by rank; () for a pass that wrote none.
        operations: what the traces say of operators, by rank; () without a trace.
        domains: knob key -> values that the study may set.
        effect: function of (key, value) that returns the gain of setting one more knob, by the study's trials; None if they
            do not say.
    """

    record: TrialRecord
    cwd: str = ""
    host_context: HostContext
    lines: Sequence[Lines] = ()
    memory: Sequence[Memory] = ()
    operations: Sequence[Operations] = ()
    domains: Mapping[str, Sequence[KnobValue]] = field(default_factory=dict)
    effect: Effect = nothing_known

    @property
    def is_cuda(self) -> bool:
        """Whether the program trains on a CUDA device."""
        return self.host_context.has_cuda

    @property
    def first(self) -> Lines:
        """The document of rank 0's pass "lines"; valid only if there is one."""
        return self.lines[0]

    @property
    def step_s(self) -> float:
        """Seconds of a step under the pass "lines"."""
        return self.first.seconds / max(1, self.first.steps)

    @property
    def trial_step_s(self) -> float:
        """Seconds of a step as the trial measured it, without any pass; as under the pass "lines" if the trial has no rate."""
        samples = self.first.samples / max(1, self.first.steps) * len(self.lines)
        is_alike = self.record.value and self.record.unit == self.first.unit
        return samples / self.record.value if is_alike and self.record.value else self.step_s

    @property
    def busy_s(self) -> float:
        """Seconds of a step less its wait for input, or the seconds of a step at the device rate D if those are fewer."""
        busy_s = max(self.step_s - self.wait_s, 0.0)
        samples = self.first.samples / max(1, self.first.steps) * len(self.lines)
        is_alike = self.record.device_rate and self.record.unit == self.first.unit
        return min(busy_s, samples / self.record.device_rate) if is_alike and self.record.device_rate else busy_s

    @property
    def slowdown(self) -> float | None:
        """How many times as long a step took under the pass "lines" as when the trial was measured; None if unknown."""
        if not self.lines or not self.record.value or self.first.unit != self.record.unit:
            return None
        samples = math.fsum(one.samples / max(1, one.steps) for one in self.lines)
        return self.step_s * self.record.value / samples if samples else None

    @property
    def wait_s(self) -> float:
        """Seconds a step in which the training thread waits for input or, without workers, makes the input itself."""
        return self.first.phases_s.get(INPUT, 0.0) if self.first.wait_s is None else self.first.wait_s

    @property
    def batch(self) -> float:
        """Samples that one rank's loader makes for a step."""
        lines = self.first
        return float(lines.batch_size or lines.samples / max(1, lines.steps))

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

    def own_lines(self, where: str = MAIN) -> list[Line]:
        """Returns the program's own lines of rank 0 that ran in the training thread or in workers, most seconds first."""
        found = [line for line in self.first.lines if line.is_own and line.where == where and GENERATED not in line.file]
        return sorted(found, key=lambda line: -line.self_s)

    def value(self, knob: str) -> KnobValue | None:
        """Returns a knob's value in this configuration; None if unknown."""
        return self.record.knobs.get(knob)

    def may_set(self, knob: str, value: KnobValue) -> bool:
        """Returns whether a knob can be set to this value here, and is not set to it already."""
        is_blocked = knob in self.host_context.not_applicable or self.value(knob) == value
        return not is_blocked and (knob in self.domains and value in self.domains[knob])
