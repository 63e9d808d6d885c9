"""Determines what the host did: how its events are nested, the phase of each, and which event launched each kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.explain.intervals import Ints
from autotune.explain.kernel_names import phase_of_range
from autotune.explain.nesting import Nesting, nested
from autotune.explain.trace import ANNOTATION, DEVICE, HOST, OPERATOR, RUNTIME, Trace
from autotune.harness.explain.documents import BACKWARD, STEP_PHASES


@dataclass(kw_only=True)
class Host:
    """The host's operators, ranges and runtime calls.

    Attributes:
        nesting: which of these events contain which.
        phases: for each event, in the order of `nesting.chosen`, the index of its phase in STEP_PHASES; -1 outside all phases.
        device: indices of the device's events in the trace.
        launchers: for each event of `device`, the position in `nesting.chosen` of the innermost operator that launched it; -1
            if unknown.
    """

    nesting: Nesting
    phases: Ints
    device: Ints
    launchers: Ints

    def launching_events(self) -> Ints:
        """Returns, for each event of `device`, the index in the trace of the operator that launched it; -1 if unknown."""
        events, is_known = np.full(len(self.device), -1, dtype=np.int64), self.launchers >= 0
        events[is_known] = self.nesting.chosen[self.launchers[is_known]]
        return events


def host_of(trace: Trace) -> Host:
    """Returns the host's events, their phases and the launchers of kernels."""
    chosen = np.flatnonzero(trace.is_of(*HOST))
    nesting = nested(trace, chosen)
    device = np.flatnonzero(trace.is_of(*DEVICE))
    return Host(nesting=nesting, phases=_phases(trace, nesting), device=device, launchers=_launchers(trace, nesting, device))


def _phases(trace: Trace, nesting: Nesting) -> Ints:
    by_name = np.array([phase_of_range(text) for text in trace.texts], dtype=np.int64)
    is_range = trace.categories[nesting.chosen] == ANNOTATION
    phases = nesting.spread_down(np.where(is_range, by_name[trace.names[nesting.chosen]], -1))
    of_autograd = np.isin(trace.threads[nesting.chosen], trace.autograd_threads())
    return np.where((phases < 0) & of_autograd, STEP_PHASES.index(BACKWARD), phases)


def _launchers(trace: Trace, nesting: Nesting, device: Ints) -> Ints:
    """Returns `Host.launchers`. A device event has the correlation id of its runtime call, which is inside the operator."""
    categories = trace.categories[nesting.chosen]
    operators = nesting.spread_down(np.where(categories == OPERATOR, np.arange(len(categories)), -1))  # around each event
    calls = np.flatnonzero(categories == RUNTIME)
    launchers: Ints = np.append(operators[calls], -1)[trace.partners(device, nesting.chosen[calls])]
    return launchers
